"""Map a teacher with more tokens than its student to the student's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smelt.compress.trim_vocabulary.kept_tokens import map_to_teacher_tokens

_TOKEN_ID_INPUTS = ("input_ids", "decoder_input_ids")


def map_teacher_tokens(
    teacher: Any, teacher_folder: Path, student: Any, student_folder: Path
) -> list[int] | None:
    """Make `teacher` take the student's token ids, and return logits of the student's tokens only.

    The softmax of these logits is the teacher's distribution over the student's tokens.

    Args:
        teacher: changed in place if its vocabulary differs; usable for nothing else afterwards.
        teacher_folder: where it was loaded from.
        student: the student model.
        student_folder: where it was loaded from; its `vocabulary.json` lists the kept tokens.

    Returns:
        The teacher's token id for each of the student's tokens; None if the vocabularies are the same.

    Raises:
        InputError: the student has tokens that the teacher lacks.
    """
    words, known = (_vocabulary_size(model.config) for model in (student, teacher))
    places = map_to_teacher_tokens(student_folder, teacher_folder, words, known)
    if places is None:
        return None
    table = torch.tensor(places)

    def read(module: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, Any]:
        return given, {n: _map_ids(v, table) if n in _TOKEN_ID_INPUTS else v for n, v in named.items()}

    def say(module: Any, given: tuple[Any, ...], result: Any) -> Any:
        result.logits = result.logits.index_select(-1, table.to(result.logits.device))
        return result

    teacher.register_forward_pre_hook(read, with_kwargs=True)
    if teacher.can_generate():
        teacher.register_forward_hook(say)
    teacher.config.vocab_size = words
    if getattr(teacher.config, "decoder_vocab_size", None) is not None:
        teacher.config.decoder_vocab_size = words
    return places


def _map_ids(ids: Tensor, table: Tensor) -> Tensor:
    return table.to(ids.device)[ids]


def _vocabulary_size(config: Any) -> int:
    return int(getattr(config, "decoder_vocab_size", None) or config.vocab_size)
