"""Reading and writing torch artifacts: Hugging Face config, structure edits, safetensors, tokenizer."""

from __future__ import annotations

import contextlib
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.core.files import read_json
from smelt.core.labels import CLASSIFIERS
from smelt.core.stage import StoredDtype
from smelt.runtime.generate.shortlist import FILE as SHORTLIST
from smelt.runtime.layers.quantized import matrix_types
from smelt.runtime.models.conv1d import turned, use_linears
from smelt.runtime.models.edits.apply import apply_edits
from smelt.runtime.models.places.fill import fill, with_prefix
from smelt.runtime.models.places.unread_tensors import is_unread
from smelt.runtime.models.sentence_model import as_bare_encoder, is_sentence_model, sentence_class
from smelt.runtime.models.stored_dtype import config_type, narrowed, stored_types
from smelt.runtime.models.structure import Edit, read_edits, scheme_options, with_masks, write_edits
from smelt.runtime.models.weight_files import INDEX, WEIGHTS, find_weights, values_in, weight_tensors
from smelt.runtime.schemes.registry import check_options, find
from smelt.runtime.text.rules import apply_text_rules, read_text_rules
from smelt.runtime.text.sentence_files import FILES, MODULES, SETTINGS, read_sentence_rules

_NOT_TOKENIZER = {
    "config.json",
    "generation_config.json",
    "structure.json",
    "manifest.json",
    INDEX,
    MODULES,
    SETTINGS,
}
# torch's functions that draw weights: normal_, kaiming_uniform_, ...
_DRAWS: dict[str, Any] = {
    name: draw for name, draw in vars(nn.init).items() if name.endswith("_") and not name.startswith("_")
}
_quiet = threading.RLock()
TOKENIZER_SUFFIXES = {".json", ".spm", ".model", ".txt", ".jinja"}


def load_config(folder: Path) -> transformers.PretrainedConfig:
    """Read `config.json`; code that a checkpoint brings along is never run.

    Raises:
        InputError: it is missing or not a config that transformers knows.
    """
    path = folder / "config.json"
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each family checks its own keys and raises what it likes
        raise InputError(f"{path}: not a model config that transformers reads: {error}") from error


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer stored in `folder`, set to the prefix and languages that lie beside it.

    Raises:
        InputError: its files are missing or do not fit together.
    """
    try:
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # tokenizers raise bare Exceptions from Rust, all meaning: cannot be read
        raise InputError(f"{folder}: the tokenizer cannot be read: {error}") from error
    apply_text_rules(tokenizer, read_text_rules(folder))
    return tokenizer


def load_model(folder: Path) -> tuple[Any, list[Edit]]:
    """Build the model on the meta device, apply its edits, then read its tensors.

    Returns the model (float32, CPU, eval mode) and the edits, to which a stage adds its own.

    Raises:
        InputError: weights are missing, damaged, or do not fit the config and the edits.
    """
    model, edits = empty_model(folder)
    fill(model, turned(model, with_prefix(model, read_tensors(folder))), folder)
    model.eval()
    return model, edits


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
            f" {error}"
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
            f"{folder}/config.json: 'architectures' is {names}; expected one class of transformers."
        )
    return kind


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the model in `folder`; floating ones as float32.

    Raises:
        InputError: there are none, or a file of them is missing, damaged or incomplete.
    """
    weights = find_weights(folder)
    tensors: dict[str, Tensor] = {}
    for path in weights.files:
        try:
            found = load_file(path)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: not a readable safetensors file: {error}") from error
        weights.require(path, found)
        tensors.update({name: tensor for name, tensor in found.items() if weights.takes(path, name)})
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def save_model(model: Any, edits: list[Edit], out: Path, src: Path, dtype: StoredDtype = "keep") -> list[str]:
    """Write `model` into `out`: config, edits, weights; the tokenizer's files are copied from `src`.

    Tensors that share memory are stored once, under the first of their names. Codes and scales of
    quantized layers are stored in the types of their scheme.

    Args:
        model: float32.
        edits: its structure.
        out: a folder.
        src: the folder of the model that it was made from.
        dtype: how float weights are stored; keep: each as in `src` (float32 where `src` holds no weights).

    Returns:
        What the user should know: weights that do not fit into 16 bits.
    """
    edits = with_masks(model, edits)
    tensors, names = _distinct(model)
    types = stored_types(src, dtype)
    fixed = matrix_types(model)
    wanted = {
        name: fixed[name] if name in fixed else types.of(names[name])
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }
    stored, notes = narrowed(tensors, wanted)
    stored = turned(model, stored)
    if is_sentence_model(model) and not edits:  # else nobody but smelt reads it, by the names in its edits
        stored = as_bare_encoder(model, stored)
    save_file(stored, out / WEIGHTS, metadata={"format": "pt"})
    save_beside(model, edits, out, src, config_type(t for name, t in stored.items() if name not in fixed))
    return notes


def save_beside(model: Any, edits: list[Edit], out: Path, src: Path, dtype: str) -> None:
    """Write into `out` what lies beside the weights: config (saying `dtype`), edits, tokenizer's files."""
    model.config.architectures = [getattr(model, "body_class", type(model)).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(out)
    if model.can_generate():
        model.generation_config.save_pretrained(out)
    write_edits(out, edits)
    copy_tokenizer(src, out)


def _distinct(model: Any) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Return the tensors that a file holds by the first of their names, and all names of each."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    first: dict[tuple[int, torch.Size], str] = {}
    tensors: dict[str, Tensor] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in model.state_dict().items():
        if name in ignored:
            continue
        place = (tensor.data_ptr(), tensor.shape)
        known = first.setdefault(place, name) if tensor.numel() else name
        names.setdefault(known, []).append(name)
        if known == name:
            tensors[name] = tensor.detach().cpu().contiguous()
    return tensors, names


def copy_tokenizer(src: Path, out: Path) -> None:
    """Copy the files of `src` of its tokenizer, its shortlist, and those that say how it makes vectors."""
    if (src / SHORTLIST).is_file():
        shutil.copyfile(src / SHORTLIST, out / SHORTLIST)
    for path in sorted(src.iterdir()):
        if path.is_file() and path.suffix in TOKENIZER_SUFFIXES and path.name not in _NOT_TOKENIZER:
            shutil.copyfile(path, out / path.name)
    for name in FILES:
        if (src / MODULES).is_file() and (src / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(src / name, out / name)


def count_parameters(folder: Path) -> int:
    """Return the number of values in the weights of `folder`, read from their headers.

    Packed codes count as what they hold (see `Stored.packs`). What no model reads (masks and positions that
    old checkpoints hold) is none of it.
    """
    packed = _packed(read_edits(folder))
    family, embeds = str(read_json(folder / "config.json").get("model_type")), (folder / MODULES).is_file()
    return sum(
        packed.get(name, 1) * values_in(entry)
        for _, name, entry in weight_tensors(folder)
        if not is_unread(family, name, embeds=embeds)
    )


def _packed(edits: list[Edit]) -> dict[str, int]:
    """Return how many values an element holds, by the names of quantized matrices' tensors."""
    found: dict[str, int] = {}
    for edit in (e for e in edits if e.get("op") == "quantize"):
        scheme, options = find(edit.get("scheme")), scheme_options(edit)
        check_options(scheme, options)
        for name, stored in scheme.storage(1, 1, options).items():
            # behind `coded` where an adapter stands beside the codes, or their inputs are binary; or both
            for place in ("matrix", "coded.matrix", "coded.coded.matrix"):
                found[f"{edit.get('module')}.{place}.{name}"] = stored.packs
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars, load reports and advice off the terminal.

    All of that is set for the whole process, so one thread at a time; two would put back each other's.
    """
    with _quiet:
        yield from _hush()


def _hush() -> Iterator[None]:
    caught = warnings.catch_warnings()
    caught.__enter__()
    warnings.simplefilter("ignore")  # MarianTokenizer recommends a package that changes nothing here
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        caught.__exit__(None, None, None)
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def linear_modules(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield every `nn.Linear` of `model` with its dotted name, in order."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module
