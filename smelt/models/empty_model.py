"""The model of a folder's config and edits, with its weights on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.data.labels import CLASSIFIER_SUFFIXES
from smelt.models.conv1d import replace_conv1d
from smelt.models.edits import apply_edits
from smelt.models.sentence_model import sentence_class
from smelt.models.structure import Edit, read_edits
from smelt.models.text_rules import read_sentence_rules

# torch's functions that initialize weights: normal_, kaiming_uniform_, ...
_INIT_FUNCTIONS: dict[str, Any] = {
    name: draw for name, draw in vars(nn.init).items() if name.endswith("_") and not name.startswith("_")
}


def load_config(folder: Path) -> transformers.PretrainedConfig:
    """Return the config in `config.json`; code of a checkpoint is never run.

    Raises:
        InputError: it is missing or not a config of transformers.
    """
    path = folder / "config.json"
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each family checks its own keys and raises different exceptions
        raise InputError(
            f"{path}: transformers cannot read this model config: {error}", code="wrong-config"
        ) from error


def empty_model(folder: Path) -> tuple[Any, list[Edit]]:
    """Return the model of `folder` with its edits applied and weights on the meta device, and its edits.

    Raises:
        InputError: config and edits do not define a model.
    """
    config = load_config(folder)
    config.dtype = torch.float32  # in memory, whatever the file holds
    kind = _model_class(config, folder)
    edits = read_edits(folder)
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False), _skip_weight_init():
            model = kind(config)
    except Exception as error:  # invalid or inconsistent sizes
        raise InputError(
            f"{folder}/config.json: transformers cannot create a {kind.__name__} from it:"
            f" {type(error).__name__}: {error}",
            code="wrong-config",
        ) from error
    replace_conv1d(model)
    apply_edits(model, edits)
    if (folder / "generation_config.json").is_file() and model.can_generate():
        read_json_object(folder / "generation_config.json")  # reports errors with our own messages
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            # newer files have it only there, and training reads the config
            config.decoder_start_token_id = model.generation_config.decoder_start_token_id
    return model, edits


@contextlib.contextmanager
def _skip_weight_init() -> Iterator[None]:
    """Skip the initialization of weights on the meta device: it has no effect and takes half of the time."""
    from transformers import initialization

    ways: dict[str, Any] = getattr(initialization, "TORCH_INIT_FUNCTIONS", {})  # what transformers' own call
    ours = {name: _unless_meta(draw) for name, draw in _INIT_FUNCTIONS.items()}
    vars(nn.init).update(ours)
    ways.update({name: ours[name] for name in ways.keys() & ours})
    try:
        yield
    finally:  # torch's own, not the replaced ones: another thread may be in here too
        vars(nn.init).update(_INIT_FUNCTIONS)
        ways.update({name: _INIT_FUNCTIONS[name] for name in ways.keys() & _INIT_FUNCTIONS})


def _unless_meta(draw: Any) -> Any:
    def draws(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor if tensor.is_meta else draw(tensor, *args, **kwargs)

    return draws


def _model_class(config: Any, folder: Path) -> Any:
    """Return the model's class: a sentence embedder if the folder has its files, else the config's.

    Raises:
        InputError: it is not a class of transformers.
    """
    names = config.architectures or []
    named = str(names[0]) if isinstance(names, list) and names else ""
    # classifiers that smelt created from a sentence embedder in early versions still have the file
    rules = None if named.endswith(CLASSIFIER_SUFFIXES) else read_sentence_rules(folder)
    if rules is not None:
        return sentence_class(config, rules)
    kind = getattr(transformers, named, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise InputError(
            f"{folder}/config.json: 'architectures' is {names}; expected the name of one transformers class.",
            code="unknown-architecture",
        )
    return kind
