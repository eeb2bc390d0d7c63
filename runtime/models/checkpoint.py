"""Reading and writing torch artifacts: Hugging Face config, structure edits, safetensors, tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from smelt.core.artifact import is_known_kind
from smelt.core.errors import InputError
from smelt.core.files import read_json
from smelt.core.messages import Message
from smelt.core.stage import StoredDtype
from smelt.runtime.generate.shortlist import FILE as SHORTLIST
from smelt.runtime.layers.quantized import matrix_types
from smelt.runtime.models.conv1d import turned
from smelt.runtime.models.making.empty_model import empty_model
from smelt.runtime.models.places.fill import fill, with_prefix
from smelt.runtime.models.quiet import quiet
from smelt.runtime.models.sentence_model import as_bare_encoder, is_sentence_model
from smelt.runtime.models.stored_dtype import config_type, narrowed, stored_types
from smelt.runtime.models.structure import Edit, with_masks, write_edits
from smelt.runtime.models.weight_files import INDEX, WEIGHTS, find_weights, oversized
from smelt.runtime.text.rules import apply_text_rules, read_text_rules
from smelt.runtime.text.sentence_files import FILES, MODULES, SETTINGS

_NOT_TOKENIZER = {
    "config.json",
    "generation_config.json",
    "structure.json",
    "manifest.json",
    INDEX,
    MODULES,
    SETTINGS,
}
TOKENIZER_SUFFIXES = {".json", ".spm", ".model", ".txt", ".jinja"}


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
        raise InputError(
            f"{folder}: the tokenizer cannot be read: {error}", code="damaged-tokenizer"
        ) from error
    apply_text_rules(tokenizer, read_text_rules(folder))
    return tokenizer


def load_model(folder: Path) -> tuple[Any, list[Edit]]:
    """Build the model on the meta device, apply its edits, then read its tensors.

    Returns the model (float32, CPU, eval mode) and the edits, to which a stage adds its own.

    Raises:
        InputError: weights are missing, damaged, or do not fit the config and the edits.
    """
    if (wrong := oversized(folder, read_json(folder / "config.json"))) is not None:
        raise InputError(wrong, code="config-exceeds-weights")
    model, edits = empty_model(folder)
    fill(model, turned(model, with_prefix(model, read_tensors(folder))), folder)
    model.eval()
    return model, edits


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
            raise InputError(
                f"{path}: not a readable safetensors file: {error}", code="damaged-weights"
            ) from error
        weights.require(path, found)
        tensors.update({name: tensor for name, tensor in found.items() if weights.takes(path, name)})
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def save_model(
    model: Any, edits: list[Edit], out: Path, src: Path, dtype: StoredDtype = "keep"
) -> list[Message]:
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


def _is_tokenizers(path: Path) -> bool:
    return path.suffix in TOKENIZER_SUFFIXES and path.name not in _NOT_TOKENIZER and is_known_kind(path.name)


def copy_tokenizer(src: Path, out: Path) -> None:
    """Copy the files of `src` of its tokenizer, its shortlist, and those that say how it makes vectors."""
    if (src / SHORTLIST).is_file():
        shutil.copyfile(src / SHORTLIST, out / SHORTLIST)
    for path in sorted(src.iterdir()):
        if path.is_file() and _is_tokenizers(path):
            shutil.copyfile(path, out / path.name)
    for name in FILES:
        if (src / MODULES).is_file() and (src / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(src / name, out / name)
