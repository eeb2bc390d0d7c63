"""A vocabulary that can be trimmed, independent of its file format.

Renumber the token ids in configs after trimming a vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrimmableVocabulary:
    """The tokens of a tokenizer.

    kind: tokenizer type, for messages. ids: of every token, added ones too. required: ids that are always
    kept. dependencies: from an id to the ids that must be kept with it. write: from the folder and the new id
    of each kept id, writes the tokenizer's files and removes those that they replace.
    """

    kind: str
    ids: Mapping[str, int]
    required: frozenset[int]
    dependencies: Callable[[int], frozenset[int]]
    write: Callable[[Path, Mapping[int, int]], None]


# Keys of config.json and generation_config.json that hold a token id, or a list of them.
TOKEN_ID_KEYS = (
    "pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "sep_token_id", "cls_token_id",
    "mask_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id",
)  # fmt: skip
# Keys with suppressed tokens; removed tokens are dropped from their lists.
SUPPRESSED_TOKEN_KEYS = ("suppress_tokens", "begin_suppress_tokens")
PHRASE_KEYS = ("bad_words_ids", "force_words_ids")


def config_token_ids(config: Mapping[str, Any]) -> set[int]:
    """Return the token ids in `config` that must be kept."""
    found: set[int] = set()
    for word in TOKEN_ID_KEYS:
        value = config.get(word)
        found |= {at for at in (value if isinstance(value, list) else [value]) if isinstance(at, int)}
    for phrase in config.get("bad_words_ids") or ():
        found |= set(phrase) if len(phrase) == 1 else set()  # such as padding, which Marian suppresses
    return found


def renumber_config(config: Any, new_ids: Mapping[int, int], size: int) -> None:
    """Replace the token ids in `config` (a config object of transformers) by the new ones, in place.

    An id outside of the vocabulary (ModernBERT's defaults in a small model) is not changed.

    Args:
        config: a model's or a generation config.
        new_ids: new id of each kept token.
        size: of the vocabulary before.
    """

    def of(at: Any) -> Any:
        return new_ids[at] if isinstance(at, int) and not isinstance(at, bool) and 0 <= at < size else at

    for word in TOKEN_ID_KEYS:
        value = getattr(config, word, None)
        if value is not None:
            setattr(config, word, [of(at) for at in value] if isinstance(value, list) else of(value))
    for word in SUPPRESSED_TOKEN_KEYS:
        value = getattr(config, word, None)
        if isinstance(value, list):
            setattr(config, word, [new_ids[at] for at in value if at in new_ids] or None)
    for word in PHRASE_KEYS:
        value = getattr(config, word, None)
        if isinstance(value, list):
            left = [[new_ids[at] for at in phrase] for phrase in value if all(at in new_ids for at in phrase)]
            setattr(config, word, left or None)
