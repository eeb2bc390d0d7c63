"""Numbers of tokens in configs, before and after a vocabulary was trimmed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Words of config.json and generation_config.json that hold a token, or a list of tokens.
TOKENS = (
    "pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "sep_token_id", "cls_token_id",
    "mask_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id",
)  # fmt: skip
# Words that hold tokens which may not come, where one that cannot come any more is dropped.
BARRED = ("suppress_tokens", "begin_suppress_tokens")
PHRASES = ("bad_words_ids", "force_words_ids")


def named_tokens(config: Mapping[str, Any]) -> set[int]:
    """Return the tokens that `config` names and that must not go."""
    found: set[int] = set()
    for word in TOKENS:
        value = config.get(word)
        found |= {at for at in (value if isinstance(value, list) else [value]) if isinstance(at, int)}
    for phrase in config.get("bad_words_ids") or ():
        found |= set(phrase) if len(phrase) == 1 else set()  # such as padding, which Marian bars
    return found


def renumber(config: Any, new: Mapping[int, int], size: int) -> None:
    """Give the tokens that `config` (a config object of transformers) names their new numbers, in place.

    A number outside of the vocabulary (ModernBERT's defaults in a small model) stays as it is.

    Args:
        config: a model's or a generation config.
        new: the new number of each token that stays.
        size: of the vocabulary before.
    """

    def of(at: Any) -> Any:
        return new[at] if isinstance(at, int) and not isinstance(at, bool) and 0 <= at < size else at

    for word in TOKENS:
        value = getattr(config, word, None)
        if value is not None:
            setattr(config, word, [of(at) for at in value] if isinstance(value, list) else of(value))
    for word in BARRED:
        value = getattr(config, word, None)
        if isinstance(value, list):
            setattr(config, word, [new[at] for at in value if at in new] or None)
    for word in PHRASES:
        value = getattr(config, word, None)
        if isinstance(value, list):
            left = [[new[at] for at in phrase] for phrase in value if all(at in new for at in phrase)]
            setattr(config, word, left or None)
