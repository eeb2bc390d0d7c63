"""Write tokenizer files that transformers 4, transformers 5 and transformers.js open.

transformers 5 names the class of a tokenizer.json `TokenizersBackend`, which 4 does not have, and lists
further special tokens under `extra_special_tokens`, where 4 expects an object. All of them support
`PreTrainedTokenizerFast` and `additional_special_tokens`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json
from smelt.runtime.causal import is_causal
from smelt.runtime.text.length_limits import NO_LIMIT, max_input_length
from smelt.runtime.text.text_preprocessing import TEXT_RULES_FILE as RULES
from smelt.runtime.text.text_preprocessing import read_text_rules
from smelt.runtime.text.tokenizer_info import TOKENIZER_INFO_FILE as TOKENIZING
from smelt.runtime.text.tokenizer_info import read_tokenizer_info

TOKENIZER_CONFIG_FILE, TOKENIZER_JSON_FILE, ADDITIONAL_TOKENS_KEY = (
    "tokenizer_config.json",
    "tokenizer.json",
    "additional_special_tokens",
)
FAST_TOKENIZER_CLASS, BERT_TOKENIZER_CLASS = "PreTrainedTokenizerFast", "BertTokenizer"
# keys of transformers 5 only, or written by smelt
_DROPPED = ("backend", "is_local", "local_files_only")
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_NOT_COPIED = frozenset({"model.onnx_data", RULES, TOKENIZING})


def copy_tokenizer_files(source: Path, folder: Path) -> None:
    """Write the tokenizer of the exported model in `source` into `folder`.

    Raises:
        InputError: it has no tokenizer_config.json, or a file is damaged.
    """
    config, details = read_json_object(source / "config.json"), read_tokenizer_info(source)
    said = read_json_object(source / TOKENIZER_CONFIG_FILE)
    if not said:
        raise InputError(
            f"{source / TOKENIZER_CONFIG_FILE}: this tokenizer file is missing, and other libraries require"
            f" it. Copy it from the original model.",
            code="missing-file",
            file=str(source / TOKENIZER_CONFIG_FILE),
        )
    fast = (source / TOKENIZER_JSON_FILE).is_file() and details.reader != "sentencepiece"
    names = (TOKENIZER_JSON_FILE,) if fast else _slow_tokenizer_files(source)
    for name in (*names, *(path.name for path in source.glob("*.jinja"))):
        shutil.copyfile(source / name, folder / name)
    said = portable_tokenizer_config(said)
    if fast:
        said |= {
            "tokenizer_class": FAST_TOKENIZER_CLASS,
            "clean_up_tokenization_spaces": details.clean_up,
            "model_input_names": [
                "input_ids", *(["token_type_ids"] if details.types else []), "attention_mask",
            ],
        }  # fmt: skip
        said |= _special_tokens(source, said)
    limit = max_input_length(_LengthLimit(details.longest), config)
    said["model_max_length"] = min(int(said.get("model_max_length") or NO_LIMIT), limit)
    if is_causal(config):
        said["padding_side"] = "left"
        if "pad_token" not in said and said.get("eos_token"):
            said["pad_token"] = said["eos_token"]  # padding is masked, so any token will do
    write_json(folder / TOKENIZER_CONFIG_FILE, said)


def portable_tokenizer_config(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json with keys that all versions support."""
    kept = {word: value for word, value in said.items() if word not in _DROPPED}
    extra = kept.get("extra_special_tokens")
    if isinstance(extra, list):
        del kept["extra_special_tokens"]
        if extra:
            kept[ADDITIONAL_TOKENS_KEY] = [*kept.get(ADDITIONAL_TOKENS_KEY, []), *extra]
    return kept


def preprocessing_notes(source: Path) -> tuple[str, ...]:
    """Return notes on smelt's preprocessing of texts, which users of other libraries have to repeat."""
    rules = read_text_rules(source)
    notes = []
    if rules.lower:
        notes.append(
            "Convert texts to lower case: smelt does this before the tokenizer, other libraries do not."
        )
    if rules.prefix:
        notes.append(f"Add the prefix {rules.prefix!r} to every text: smelt adds it, other libraries do not.")
    return tuple(notes)


def with_prefix(source: Path, text: str) -> str:
    """Return an example text with the prefix that users of other libraries have to add."""
    rules = read_text_rules(source)
    return rules.prefix + (text.lower() if rules.lower else text)


def extra_requirements(folder: Path) -> str:
    """Return the `pip install` requirements of the tokenizer in `folder`, with a leading space, or ""."""
    return " sentencepiece" if any(folder.glob("*.spm")) or any(folder.glob("*.model")) else ""


class _LengthLimit:
    def __init__(self, longest: int) -> None:
        self.model_max_length = longest


def _special_tokens(source: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens by their roles, which a tokenizer class of its own would define."""
    from smelt.runtime.models.checkpoint import load_tokenizer

    hub = load_tokenizer(source)
    found: dict[str, Any] = {}
    for role in _ROLES:
        token = getattr(hub, f"{role}_token", None)
        if token is not None:
            found[f"{role}_token"] = str(token)
    others = [str(t) for t in hub.all_special_tokens if str(t) not in found.values()]
    if others or ADDITIONAL_TOKENS_KEY in said:
        found[ADDITIONAL_TOKENS_KEY] = others
    return found


def _slow_tokenizer_files(source: Path) -> list[str]:
    """Return the names of the files of a tokenizer without tokenizer.json."""
    others = {
        "config.json",
        "generation_config.json",
        "manifest.json",
        TOKENIZER_CONFIG_FILE,
        "modules.json",
    } | _NOT_COPIED
    ends = {".json", ".spm", ".model", ".txt"}
    names = [p.name for p in sorted(source.iterdir()) if p.is_file() and p.suffix in ends]
    return [name for name in names if name not in others and not name.startswith("sentence_")]
