"""The model that a folder's config and edits say, its weights on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from smelt.core.errors import InputError
from smelt.core.files import read_json
from smelt.core.labels import CLASSIFIERS
from smelt.runtime.models.conv1d import use_linears
from smelt.runtime.models.edits.apply import apply_edits
from smelt.runtime.models.sentence_model import sentence_class
from smelt.runtime.models.structure import Edit, read_edits
from smelt.runtime.text.sentence_files import read_sentence_rules

# torch's functions that draw weights: normal_, kaiming_uniform_, ...
_DRAWS: dict[str, Any] = {
    name: draw for name, draw in vars(nn.init).items() if name.endswith("_") and not name.startswith("_")
}


def load_config(folder: Path) -> transformers.PretrainedConfig:
    """Read `config.json`; code that a checkpoint brings along is never run.

    Raises:
        InputError: it is missing or not a config that transformers knows.
    """
    path = folder / "config.json"
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each family checks its own keys and raises what it likes
        raise InputError(
            f"{path}: not a model config that transformers reads: {error}", code="wrong-config"
        ) from error


def empty_model(folder: Path) -> tuple[Any, list[Edit]]:
    """Return the model of `folder` as its structure says, its weights on the meta device, and its edits.

    Raises:
        InputError: config and edits make no model.
    """
    config = load_config(folder)
    config.dtype = torch.float32  # in memory, whatever the file holds
    kind = _class_of(config, folder)
    edits = read_edits(folder)
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False), _nothing_drawn():
            model = kind(config)
    except Exception as error:  # sizes that do not go together, or are none
        raise InputError(
            f"{folder}/config.json: transformers makes no {kind.__name__} of it: {type(error).__name__}:"
            f" {error}",
            code="wrong-config",
        ) from error
    use_linears(model)
    apply_edits(model, edits)
    if (folder / "generation_config.json").is_file() and model.can_generate():
        read_json(folder / "generation_config.json")  # says what is wrong with it in our words
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            # newer files say it only there, and training reads the config
            config.decoder_start_token_id = model.generation_config.decoder_start_token_id
    return model, edits


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Pass over the drawing of weights on the meta device, which changes none: half of a model's making."""
    from transformers import initialization

    ways: dict[str, Any] = getattr(initialization, "TORCH_INIT_FUNCTIONS", {})  # what transformers' own call
    ours = {name: _unless_meta(draw) for name, draw in _DRAWS.items()}
    vars(nn.init).update(ours)
    ways.update({name: ours[name] for name in ways.keys() & ours})
    try:
        yield
    finally:  # torch's own, not what was found: another thread may be in here too
        vars(nn.init).update(_DRAWS)
        ways.update({name: _DRAWS[name] for name in ways.keys() & _DRAWS})


def _unless_meta(draw: Any) -> Any:
    def draws(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor if tensor.is_meta else draw(tensor, *args, **kwargs)

    return draws


def _class_of(config: Any, folder: Path) -> Any:
    """Return the model's class: a sentence embedder where the folder says so, else what the config names.

    Raises:
        InputError: it names none of transformers.
    """
    names = config.architectures or []
    named = str(names[0]) if isinstance(names, list) and names else ""
    # classifiers that smelt made of a sentence embedder before it knew of these keep the file
    rules = None if named.endswith(CLASSIFIERS) else read_sentence_rules(folder)
    if rules is not None:
        return sentence_class(config, rules)
    kind = getattr(transformers, named, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise InputError(
            f"{folder}/config.json: 'architectures' is {names}; expected one class of transformers.",
            code="unknown-architecture",
        )
    return kind
