"""Tokenizer files that transformers 4, transformers 5 and transformers.js open.

transformers 5 calls the class of a tokenizer.json `TokenizersBackend`, which 4 does not know, and lists
further special tokens under `extra_special_tokens`, where 4 wants an object. All of them know
`PreTrainedTokenizerFast` and `additional_special_tokens`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import read_json, write_json
from smelt.runtime.causal import is_causal
from smelt.runtime.text.limits import NO_LIMIT, length_limit
from smelt.runtime.text.rules import FILE as RULES
from smelt.runtime.text.rules import read_text_rules
from smelt.runtime.text.tokenizing_file import FILE as TOKENIZING
from smelt.runtime.text.tokenizing_file import read_tokenizing

CONFIG, TOKENS, ADDED = "tokenizer_config.json", "tokenizer.json", "additional_special_tokens"
FAST, OF_TYPES = "PreTrainedTokenizerFast", "BertTokenizer"
# of transformers 5 alone, or of what smelt wrote
_DROPPED = ("backend", "is_local", "local_files_only")
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_OTHERS = frozenset({"model.onnx_data", RULES, TOKENIZING})


def copy_tokenizer_files(source: Path, folder: Path) -> None:
    """Write the tokenizer of the exported model in `source` into `folder`.

    Raises:
        InputError: it has no tokenizer_config.json, or a file is damaged.
    """
    config, details = read_json(source / "config.json"), read_tokenizing(source)
    said = read_json(source / CONFIG)
    if not said:
        raise InputError(
            f"{source / CONFIG}: this file of the tokenizer is missing; others need it.",
            code="missing-file",
            file=str(source / CONFIG),
        )
    fast = (source / TOKENS).is_file() and details.reader != "sentencepiece"
    names = (TOKENS,) if fast else _slow_files(source)
    for name in (*names, *(path.name for path in source.glob("*.jinja"))):
        shutil.copyfile(source / name, folder / name)
    said = portable(said)
    if fast:
        said |= {
            "tokenizer_class": FAST,
            "clean_up_tokenization_spaces": details.clean_up,
            "model_input_names": [
                "input_ids", *(["token_type_ids"] if details.types else []), "attention_mask",
            ],
        }  # fmt: skip
        said |= _special_tokens(source, said)
    limit = length_limit(_Limit(details.longest), config)
    said["model_max_length"] = min(int(said.get("model_max_length") or NO_LIMIT), limit)
    if is_causal(config):
        said["padding_side"] = "left"
        if "pad_token" not in said and said.get("eos_token"):
            said["pad_token"] = said["eos_token"]  # what is padded is masked, so any will do
    write_json(folder / CONFIG, said)


def portable(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tokenizer_config.json says in words that all versions read."""
    kept = {word: value for word, value in said.items() if word not in _DROPPED}
    extra = kept.get("extra_special_tokens")
    if isinstance(extra, list):
        del kept["extra_special_tokens"]
        if extra:
            kept[ADDED] = [*kept.get(ADDED, []), *extra]
    return kept


def notes_on_texts(source: Path) -> tuple[str, ...]:
    """Say what smelt does to a text before its tokenizer, which others have to do themselves."""
    rules = read_text_rules(source)
    notes = []
    if rules.lower:
        notes.append("Give texts in lower case: smelt does it before the tokenizer, others do not.")
    if rules.prefix:
        notes.append(f"Put {rules.prefix!r} before every text: smelt does it by itself, others do not.")
    return tuple(notes)


def prefixed(source: Path, text: str) -> str:
    """Return an example of a text as others have to give it."""
    rules = read_text_rules(source)
    return rules.prefix + (text.lower() if rules.lower else text)


def more_for(folder: Path) -> str:
    """Return what `pip install` needs for the tokenizer in `folder`, with a blank before; or nothing."""
    return " sentencepiece" if any(folder.glob("*.spm")) or any(folder.glob("*.model")) else ""


class _Limit:
    def __init__(self, longest: int) -> None:
        self.model_max_length = longest


def _special_tokens(source: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens by their roles, as words; a class of its own would know them by itself."""
    from smelt.runtime.models.checkpoint import load_tokenizer

    hub = load_tokenizer(source)
    found: dict[str, Any] = {}
    for role in _ROLES:
        token = getattr(hub, f"{role}_token", None)
        if token is not None:
            found[f"{role}_token"] = str(token)
    others = [str(t) for t in hub.all_special_tokens if str(t) not in found.values()]
    if others or ADDED in said:
        found[ADDED] = others
    return found


def _slow_files(source: Path) -> list[str]:
    """Return the names of the files that a tokenizer without tokenizer.json is read from."""
    others = {"config.json", "generation_config.json", "manifest.json", CONFIG, "modules.json"} | _OTHERS
    ends = {".json", ".spm", ".model", ".txt"}
    names = [p.name for p in sorted(source.iterdir()) if p.is_file() and p.suffix in ends]
    return [name for name in names if name not in others and not name.startswith("sentence_")]
