"""Running text for masked language models: windows whose tokens are masked as in BERT's pretraining.

The text is joined, tokenized once and cut, as for language models (`smelt/models/text_rules.py`); each
window gets the special tokens that the tokenizer adds around a text. 15 % of the other tokens are predicted:
of these 80 % are replaced by the mask token, 10 % by a random one, and 10 % stay (Devlin et al. 2019,
arXiv:1810.04805), as transformers' DataCollatorForLanguageModeling does it.

The masks of a window depend only on a key, not on other windows of its batch. So all steps of a run are
scored on the same masked positions, and a training that was interrupted, or is divided among processes,
masks as one that was not.

Shapes: L = tokens of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt.core.errors import InputError
from smelt.data.splits import Split
from smelt.models.text_rules import join_texts, window_length

MASKED_FRACTION = 0.15


@dataclass(frozen=True)
class MaskedWindow:
    """input_ids: L token ids, some of them masked. labels: the token at each of these, elsewhere -100."""

    input_ids: list[int]
    labels: list[int]


class TokenMasker:
    """Masks the tokens of windows. tokenizer: of transformers.

    Raises:
        InputError: the tokenizer has no mask token.
    """

    def __init__(self, tokenizer: Any) -> None:
        from transformers import DataCollatorForLanguageModeling

        if tokenizer.mask_token is None:
            raise InputError(
                "the tokenizer has no mask token, which masked language modeling needs. Use the tokenizer of"
                " a masked language model.",
                code="missing-special-token",
            )
        self._collator = DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=MASKED_FRACTION, return_tensors="np"
        )

    def mask(self, ids: Sequence[int], is_special: Sequence[bool], key: Sequence[int]) -> MaskedWindow:
        """Return the window of `ids` with the masks that `key` draws; special tokens are never masked."""
        self._collator.generator = np.random.default_rng(list(key))
        inputs, labels = self._collator.numpy_mask_tokens(
            np.asarray([ids], dtype=np.int64), special_tokens_mask=np.asarray([is_special])
        )
        return MaskedWindow(inputs[0].tolist(), labels[0].tolist())


@dataclass(frozen=True)
class WindowTokens:
    """The token ids of a window, and which of them are the special tokens around it."""

    ids: list[int]
    is_special: list[bool]


def cut_bidirectional_windows(
    split: Split, tokenizer: Any, limit: int, length: int | None = None
) -> list[WindowTokens]:
    """Return the windows of the joined text of `split`, which do not overlap; all but the last are full.

    Args:
        split: samples of running text.
        tokenizer: of transformers.
        limit: positions of the model.
        length: overrides the split's own, tokens with special ones.

    Raises:
        InputError: a text without tokens, or a window that is longer than the limit or has no room for a
            token.
    """
    size = min(limit, length) if length is not None else window_length(split.windows, limit)
    encoding = tokenizer(join_texts(split), return_special_tokens_mask=True, verbose=False)
    ids, special = encoding["input_ids"], encoding["special_tokens_mask"]
    if all(special):
        raise InputError(
            f"{split.origin}: the text has no tokens; at least 1 token is needed.", code="too-few-tokens"
        )
    first, end = special.index(0), len(special) - special[::-1].index(0)
    before, text, after = ids[:first], ids[first:end], ids[end:]
    step = size - len(before) - len(after)
    if step < 1:
        raise InputError(
            f"data: windows: length {size} has no room for text next to {len(before) + len(after)} special"
            " tokens; set a larger length.",
            code="window-too-short",
            setting="data.windows.length",
        )
    return [
        WindowTokens(
            [*before, *tokens, *after],
            [True] * len(before) + [False] * len(tokens) + [True] * len(after),
        )
        for tokens in (text[start : start + step] for start in range(0, len(text), step))
    ]


def fixed_masks(windows: Sequence[WindowTokens], masker: TokenMasker) -> list[MaskedWindow]:
    """Return the windows with the masks on which all steps of a run are compared."""
    return [masker.mask(window.ids, window.is_special, (0, index)) for index, window in enumerate(windows)]
