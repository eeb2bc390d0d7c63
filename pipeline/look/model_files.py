"""Do the files of a model's folder belong together? Read without torch, from JSON and headers alone.

What is looked at: each tensor's place in its safetensors file, the rows and the width of the embedding
against the config, and the tokens that the tokenizer knows against the embedding's rows. All other
shapes are compared when the model is loaded, before any stage works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.files import load_json
from smelt.core.messages import Message, mistake, warning
from smelt.families.registry import FAMILIES, find_family
from smelt.families.walk import is_word_table
from smelt.runtime.models.weight_files import weight_tensors

# https://github.com/huggingface/safetensors, "Format"; sub-byte types are counted in bits.
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6}
_BITS |= {"F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
_BITS |= {"C64": 64, "F64": 64, "I64": 64, "U64": 64}


def damaged_tensor(header: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the first entry of a safetensors header whose bytes are not its shape's."""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, (start, end) = entry["shape"], entry["data_offsets"]
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, start, end))
        bits = _BITS.get(entry["dtype"])
        if not whole or (bits is not None and math.prod(shape) * bits != 8 * (end - start)):
            return (
                f"the tensor '{str(name)[:80]}' is said to be {entry['dtype']} {str(shape)[:60]} in the bytes"
                f" {start} to {end}"
            )
    return None


def misfits(folder: Path, config: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
    """Compare tokenizer, config and embedding of the model in `folder`.

    Returns:
        What makes it unusable, and what the user should be warned of.
    """
    if broken := _broken_json(folder):
        return broken, []
    rows = config.get("vocab_size")
    if not isinstance(rows, int) or isinstance(rows, bool):
        return [], []
    problems = _embedding(folder, config, rows)
    try:
        known = _highest_token(folder, str(config.get("model_type")))
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        text = f"{folder}: the tokenizer's files cannot be read: {error}"
        return [*problems, mistake("damaged-tokenizer", text)], []
    if known is None:
        return problems, []
    count, highest = known
    if highest >= rows:
        problems.append(
            mistake(
                "tokenizer-mismatch",
                f"{folder}: the tokenizer does not belong to this model: it gives token ids up to {highest},"
                f" and the embedding has {rows} rows (vocab_size). Copy there the one it was trained with.",
            )
        )
    if not problems and count < rows // 2:
        return [], [
            warning(
                "tokenizer-much-smaller",
                f"The tokenizer has {count} tokens and the embedding {rows} rows. Does it belong to this"
                " model?",
            )
        ]
    return problems, []


def _broken_json(folder: Path) -> list[Message]:
    """Return which of the settings beside the weights are no JSON objects."""
    found = []
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            try:
                _read(folder / name)
            except (OSError, ValueError, RecursionError) as error:
                text = f"{folder / name}: {str(error).removeprefix(f'{name}: ')}"
                found.append(mistake("invalid-json", text))
    return found


def _embedding(folder: Path, config: Mapping[str, Any], rows: int) -> list[Message]:
    """Compare the embedding's shape with the config's words for it."""
    family = find_family(config)
    if family is None:
        return []
    said = _narrower(folder) or config.get(family.width)
    width = said if isinstance(said, int) else None
    for path, name, entry in weight_tensors(folder):
        shape = entry["shape"]
        if not is_word_table(family, config, name) or len(shape) != 2:
            continue
        if shape[0] != rows or width not in (None, shape[1]):
            wanted = [rows, shape[1] if width is None else width]
            return [
                mistake(
                    "shape-mismatch",
                    f"{path}: the tensor '{name}' is {shape}, and config.json asks for {wanted}"
                    " (vocab_size, width): weights and config do not belong together.",
                )
            ]
    return []


def _narrower(folder: Path) -> int | None:
    """Return how many channels an earlier `prune` left, where the structure says it and not the config."""
    try:
        edits = _read(folder / "structure.json").get("edits")
    except (OSError, ValueError, RecursionError):
        return None  # there is none; what is wrong with one says who loads the model
    edits = edits if isinstance(edits, list) else []
    kept = [edit.get("keep") for edit in edits if isinstance(edit, dict) and edit.get("op") == "width"]
    return len(kept[-1]) if kept and isinstance(kept[-1], list) else None


def _highest_token(folder: Path, kind: str) -> tuple[int, int] | None:
    """Return how many tokens the tokenizer knows and its highest id; None where its files do not say it."""
    fast = folder / "tokenizer.json"
    family = FAMILIES.get(kind)
    if (family is None or family.tokenizer.fast) and fast.is_file():
        content = _read(fast)
        vocabulary = (content.get("model") or {}).get("vocab") or {}
        # a unigram model lists its pieces, whose places are their ids
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in content.get("added_tokens") or []]
    elif (folder / "vocab.json").is_file():
        ids = list(_read(folder / "vocab.json").values())
        if (folder / "added_tokens.json").is_file():
            ids += list(_read(folder / "added_tokens.json").values())
    elif (folder / "vocab.txt").is_file():
        ids = list(range(len((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())))
    else:
        return None
    if not all(isinstance(number, int) for number in ids):
        raise ValueError("a token's id is no whole number")
    return (len(set(ids)), max(ids)) if ids else None


def _read(path: Path) -> dict[str, Any]:
    try:
        value = load_json(path)
    except ValueError as error:
        raise ValueError(f"{path.name}: broken JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: expected a JSON object")
    return value
