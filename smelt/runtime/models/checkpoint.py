"""Reads and writes torch artifacts: Hugging Face config, structure edits, safetensors, tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from smelt.core.artifact import is_artifact_file
from smelt.core.errors import InputError
from smelt.core.files import read_json_object
from smelt.core.messages import Message
from smelt.core.stage import StoredDtype
from smelt.runtime.generate.shortlist import SHORTLIST_FILE as SHORTLIST
from smelt.runtime.layers.quantized import quantized_dtypes
from smelt.runtime.models.conv1d import transpose_conv1d_tensors
from smelt.runtime.models.create.empty_model import empty_model
from smelt.runtime.models.sentence_model import as_bare_encoder, is_sentence_model
from smelt.runtime.models.silence_transformers import silence_transformers
from smelt.runtime.models.stored_dtype import cast_to_stored, config_dtype, stored_dtypes
from smelt.runtime.models.structure import Edit, add_mask_edits, write_edits
from smelt.runtime.models.weight_files import (
    WEIGHTS_FILE,
    WEIGHTS_INDEX_FILE,
    find_weights,
    oversized_setting,
)
from smelt.runtime.models.weights.load_weights import add_model_prefix, load_weights
from smelt.runtime.text.sentence_files import MODULES_FILE, SENTENCE_CONFIG_FILE, SENTENCE_FILES
from smelt.runtime.text.text_preprocessing import apply_text_rules, read_text_rules

_NOT_TOKENIZER = {
    "config.json",
    "generation_config.json",
    "structure.json",
    "manifest.json",
    WEIGHTS_INDEX_FILE,
    MODULES_FILE,
    SENTENCE_CONFIG_FILE,
}
TOKENIZER_SUFFIXES = {".json", ".spm", ".model", ".txt", ".jinja"}


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer stored in `folder`, with the prefix and languages stored next to it.

    Raises:
        InputError: its files are missing or do not match.
    """
    try:
        with silence_transformers():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # tokenizers raises bare Exceptions from Rust: the file cannot be read
        raise InputError(
            f"{folder}: the tokenizer cannot be read: {error}", code="damaged-tokenizer"
        ) from error
    apply_text_rules(tokenizer, read_text_rules(folder))
    return tokenizer


def load_model(folder: Path) -> tuple[Any, list[Edit]]:
    """Build the model on the meta device, apply its edits, then read its tensors.

    Returns the model (float32, CPU, eval mode) and the edits, to which a stage appends its own.

    Raises:
        InputError: weights are missing, damaged, or do not match the config and the edits.
    """
    if (wrong := oversized_setting(folder, read_json_object(folder / "config.json"))) is not None:
        raise InputError(wrong, code="config-exceeds-weights")
    model, edits = empty_model(folder)
    load_weights(
        model, transpose_conv1d_tensors(model, add_model_prefix(model, read_tensors(folder))), folder
    )
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
        weights.require_complete(path, found)
        tensors.update({name: tensor for name, tensor in found.items() if weights.holds(path, name)})
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def save_model(
    model: Any, edits: list[Edit], out: Path, src: Path, dtype: StoredDtype = "keep"
) -> list[Message]:
    """Write `model` into `out`: config, edits, weights; the tokenizer's files are copied from `src`.

    Tensors that share memory are stored once, under the first of their names. Quantized weights and their
    scales are stored in the types of their scheme.

    Args:
        model: float32.
        edits: its structure.
        out: a folder.
        src: the folder of the source model.
        dtype: storage type of float weights; keep: each as in `src` (float32 if `src` has no weights).

    Returns:
        Warnings: weights that do not fit into 16 bits.
    """
    edits = add_mask_edits(model, edits)
    tensors, names = _unique_tensors(model)
    types = stored_dtypes(src, dtype)
    fixed = quantized_dtypes(model)
    wanted = {
        name: fixed[name] if name in fixed else types.dtype_for(names[name])
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }
    stored, notes = cast_to_stored(tensors, wanted)
    stored = transpose_conv1d_tensors(model, stored)
    if is_sentence_model(model) and not edits:  # else only smelt reads it, with the names in its edits
        stored = as_bare_encoder(model, stored)
    save_file(stored, out / WEIGHTS_FILE, metadata={"format": "pt"})
    save_config_files(
        model, edits, out, src, config_dtype(t for name, t in stored.items() if name not in fixed)
    )
    return notes


def save_config_files(model: Any, edits: list[Edit], out: Path, src: Path, dtype: str) -> None:
    """Write the files next to the weights into `out`: config (with `dtype`), edits, tokenizer's files."""
    model.config.architectures = [getattr(model, "body_class", type(model)).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(out)
    if model.can_generate():
        model.generation_config.save_pretrained(out)
    write_edits(out, edits)
    copy_tokenizer(src, out)


def _unique_tensors(model: Any) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Return the tensors of a file by the first of their names, and all names of each."""
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


def _is_tokenizer_file(path: Path) -> bool:
    return (
        path.suffix in TOKENIZER_SUFFIXES and path.name not in _NOT_TOKENIZER and is_artifact_file(path.name)
    )


def copy_tokenizer(src: Path, out: Path) -> None:
    """Copy the tokenizer's files, the shortlist and the files of a sentence embedder from `src`."""
    if (src / SHORTLIST).is_file():
        shutil.copyfile(src / SHORTLIST, out / SHORTLIST)
    for path in sorted(src.iterdir()):
        if path.is_file() and _is_tokenizer_file(path):
            shutil.copyfile(path, out / path.name)
    for name in SENTENCE_FILES:
        if (src / MODULES_FILE).is_file() and (src / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(src / name, out / name)
