"""Windows of contexts: a question with a part of its context, for models that mark a span of it.

A window has at most `MAX_LENGTH` tokens; the next one repeats the last `STRIDE` tokens of the context, as in
transformers' example run_qa. A window whose question leaves less room repeats at most half of its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_LENGTH = 384
STRIDE = 128

Offsets = list[tuple[int, int] | None]


@dataclass(frozen=True)
class ContextWindow:
    """The tokens of a question and of a part of its context.

    example: the index of the question. ids, types: token ids, and type ids where the tokenizer has them.
    offsets: for each token its characters in the context, end exclusive; None for all others.
    """

    example: int
    ids: list[int]
    types: list[int] | None
    offsets: Offsets


def encode_contexts(
    tokenizer: Any, questions: Sequence[str], contexts: Sequence[str], max_length: int
) -> tuple[list[ContextWindow], int]:
    """Return the windows of each question in order, and the number of questions that were truncated.

    A question has at most half of a window.

    Args:
        tokenizer: a `smelt.models.tokenizer.TextTokenizer`.
        questions: n texts.
        contexts: n texts.
        max_length: tokens of a window, if fewer than `MAX_LENGTH`.

    Raises:
        InputError: the tokenizer does not return the characters of its tokens.
    """
    questions = [tokenizer.prefix + text for text in questions]
    if tokenizer.lower:
        questions, contexts = ([_lower(text) for text in texts] for texts in (questions, contexts))
    windows, truncated = list[ContextWindow](), 0
    for index, encoding in enumerate(tokenizer.encodings(questions, contexts)):
        parts, is_truncated = _divide(encoding.sequence_ids, min(max_length, MAX_LENGTH))
        truncated += is_truncated
        for positions in parts:
            owners = [encoding.sequence_ids[i] for i in positions]
            offsets = [
                encoding.offsets[i] if owner == 1 else None
                for i, owner in zip(positions, owners, strict=True)
            ]
            ids, types = ([values[i] for i in positions] for values in (encoding.ids, encoding.type_ids))
            windows.append(ContextWindow(index, ids, types, offsets))
    return windows, truncated


def _lower(text: str) -> str:
    """Return `text` in lower case, except for characters that would become several: offsets stay."""
    return "".join(low if len(low := character.lower()) == 1 else character for character in text)


def _divide(owners: Sequence[int | None], max_length: int) -> tuple[list[list[int]], bool]:
    """Return the positions of each window's tokens, and whether the question is truncated.

    owners: for each token 0 of the question, 1 of the context, None for a special one.
    """
    question = [i for i, owner in enumerate(owners) if owner == 0]
    context = [i for i, owner in enumerate(owners) if owner == 1]
    special = [i for i, owner in enumerate(owners) if owner is None]
    room = max(2, max_length - len(special))
    kept_question = question[: room // 2]
    is_truncated = len(kept_question) < len(question) and len(question) + len(context) > room
    if not is_truncated:
        kept_question = question
    size = max(1, room - len(kept_question))
    step = size - min(STRIDE, size // 2)
    starts = range(0, max(1, len(context) - size + step), step)
    return [
        sorted([*special, *kept_question, *context[start : start + size]]) for start in starts
    ], is_truncated
