"""Check without torch, from JSON and headers, that the files of a model's folder belong together.

Checked are the byte range of each tensor in its safetensors file, the embedding's shape against the config,
and the tokenizer's tokens against the embedding's rows. All other shapes are checked when the model is
loaded, before the first stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.files import load_json
from smelt.core.messages import Message, error_message, warning
from smelt.models.families.model_blocks import is_token_embedding
from smelt.models.families.registry import FAMILIES, find_family
from smelt.models.weight_files import weight_tensors

# https://github.com/huggingface/safetensors, "Format"; sub-byte types are counted in bits.
_DTYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6}
_DTYPE_BITS |= {"F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
_DTYPE_BITS |= {"C64": 64, "F64": 64, "I64": 64, "U64": 64}


def damaged_tensor_problem(header: Mapping[str, Any]) -> str | None:
    """Return a message about the first safetensors entry whose byte range does not fit its shape, or None."""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, (start, end) = entry["shape"], entry["data_offsets"]
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, start, end))
        bits = _DTYPE_BITS.get(entry["dtype"])
        if not whole or (bits is not None and math.prod(shape) * bits != 8 * (end - start)):
            return (
                f"the tensor '{str(name)[:80]}' is declared as {entry['dtype']} {str(shape)[:60]} in the"
                f" bytes {start} to {end}"
            )
    return None


def check_file_consistency(folder: Path, config: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
    """Compare tokenizer, config and embedding of the model in `folder`.

    Returns:
        Errors and warnings.
    """
    if broken := _broken_json(folder):
        return broken, []
    rows = config.get("vocab_size")
    if not isinstance(rows, int) or isinstance(rows, bool):
        return [], []
    problems = _check_embedding(folder, config, rows)
    try:
        known = _token_count_and_max_id(folder, str(config.get("model_type")))
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        text = f"{folder}: cannot read the tokenizer's files: {error}"
        return [*problems, error_message("damaged-tokenizer", text)], []
    if known is None:
        return problems, []
    count, highest = known
    if highest >= rows:
        problems.append(
            error_message(
                "tokenizer-mismatch",
                f"{folder}: the tokenizer does not fit this model: its token ids go up to {highest},"
                f" but the embedding has {rows} rows (vocab_size). Copy this model's tokenizer there.",
            )
        )
    if not problems and count < rows // 2:
        return [], [
            warning(
                "tokenizer-much-smaller",
                f"The tokenizer has only {count} tokens for {rows} rows of the embedding. Check that it"
                " belongs to this model.",
            )
        ]
    return problems, []


def _broken_json(folder: Path) -> list[Message]:
    """Return errors for JSON files of the model that are not valid JSON objects."""
    found = []
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            try:
                _read_json(folder / name)
            except (OSError, ValueError, RecursionError) as error:
                text = f"{folder / name}: {str(error).removeprefix(f'{name}: ')}"
                found.append(error_message("invalid-json", text))
    return found


def _check_embedding(folder: Path, config: Mapping[str, Any], rows: int) -> list[Message]:
    """Compare the embedding's shape with the config; return errors."""
    family = find_family(config)
    if family is None:
        return []
    declared = _pruned_width(folder) or config.get(family.hidden_size_key)
    width = declared if isinstance(declared, int) else None
    for path, name, entry in weight_tensors(folder):
        shape = entry["shape"]
        if not is_token_embedding(family, config, name) or len(shape) != 2:
            continue
        if shape[0] != rows or width not in (None, shape[1]):
            wanted = [rows, shape[1] if width is None else width]
            return [
                error_message(
                    "shape-mismatch",
                    f"{path}: the tensor '{name}' has shape {shape}, but config.json requires {wanted}"
                    " (vocab_size, width). Use the config that belongs to these weights.",
                )
            ]
    return []


def _pruned_width(folder: Path) -> int | None:
    """Return the number of channels after `prune` from structure.json, where the config is not updated."""
    try:
        edits = _read_json(folder / "structure.json").get("edits")
    except (OSError, ValueError, RecursionError):
        return None  # not an artifact; an invalid file is reported when the model is loaded
    edits = edits if isinstance(edits, list) else []
    kept = [edit.get("keep") for edit in edits if isinstance(edit, dict) and edit.get("op") == "width"]
    return len(kept[-1]) if kept and isinstance(kept[-1], list) else None


def _token_count_and_max_id(folder: Path, kind: str) -> tuple[int, int] | None:
    """Return the tokenizer's number of tokens and highest id; None if its files do not contain them."""
    fast = folder / "tokenizer.json"
    family = FAMILIES.get(kind)
    if (family is None or family.tokenizer_files.accepts_fast) and fast.is_file():
        content = _read_json(fast)
        vocabulary = (content.get("model") or {}).get("vocab") or {}
        # in a unigram model the ids are the indices of the pieces
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in content.get("added_tokens") or []]
    elif (folder / "vocab.json").is_file():
        ids = list(_read_json(folder / "vocab.json").values())
        if (folder / "added_tokens.json").is_file():
            ids += list(_read_json(folder / "added_tokens.json").values())
    elif (folder / "vocab.txt").is_file():
        ids = list(range(len((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())))
    else:
        return None
    if not all(isinstance(number, int) for number in ids):
        raise ValueError("a token id is not an integer")
    return (len(set(ids)), max(ids)) if ids else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = load_json(path)
    except ValueError as error:
        raise ValueError(f"{path.name}: invalid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: expected a JSON object")
    return value
