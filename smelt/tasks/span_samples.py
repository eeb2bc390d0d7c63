"""Questions with parts of their contexts as token ids, labeled with the tokens of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smelt.models.context_windows import ContextWindow
from smelt.models.tokenizer import uses_token_types
from smelt.tasks.samples import EncodedSample, TensorBatch, TokenLabelSample, pad_lists


@dataclass(frozen=True, slots=True)
class SpanSample(TokenLabelSample):
    """A window of a context; `target` is the first and the last token of the answer, both 0 without one."""

    @staticmethod
    def collate(samples: Sequence[EncodedSample], config: Any) -> TensorBatch:
        """Return input_ids and attention_mask (and token_type_ids), int64 [B, L], and labels, int64 [B, 2].

        The texts are padded on the right.
        """
        batch = {
            "input_ids": pad_lists([r.input_ids for r in samples], int(config.pad_token_id or 0)),
            "attention_mask": pad_lists([[1] * len(r.input_ids) for r in samples], 0),
            "labels": torch.tensor([r.target for r in samples], dtype=torch.int64),
        }
        types = [r.token_type_ids for r in samples if r.token_type_ids is not None]
        if types and uses_token_types({"model_type": config.model_type}):
            batch["token_type_ids"] = pad_lists(types, 0)
        return batch


def answer_tokens(window: ContextWindow, start: int, end: int) -> list[int]:
    """Return the first and the last token of an answer, as in transformers' example run_qa.

    Both are 0, the first token of the window, if the answer is not within it.

    Args:
        window: of the context.
        start: the first character of the answer in the context.
        end: the character after it.
    """
    spans = [(i, *span) for i, span in enumerate(window.offsets) if span is not None]
    if not spans or spans[0][1] > start or spans[-1][2] < end:
        return [0, 0]
    first = max(i for i, token_start, _ in spans if token_start <= start)
    last = min(i for i, _, token_end in spans if token_end >= end)
    return [first, max(first, last)]
