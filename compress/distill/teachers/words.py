"""A teacher that knows more words than its student, made to speak in those of the student."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smelt.compress.vocabulary.kept import same_words

_IDS = ("input_ids", "decoder_input_ids")


def speak_as(teacher: Any, teacher_folder: Path, student: Any, student_folder: Path) -> list[int] | None:
    """Let `teacher` read the student's numbers of words, and give its logits of the student's words alone.

    So the softmax of its logits is what it says of the words that the student knows, made to sum to one.

    Args:
        teacher: changed in place, where its vocabulary is another; it can be used for nothing else then.
        teacher_folder: where it was read from.
        student: the model that learns.
        student_folder: where it was read from; `vocabulary.json` there says which words stayed.

    Returns:
        For each word of the student which one of the teacher it is; None where both know the same.

    Raises:
        InputError: the student knows words that the teacher does not.
    """
    words, known = (_words(model.config) for model in (student, teacher))
    places = same_words(student_folder, teacher_folder, words, known)
    if places is None:
        return None
    table = torch.tensor(places)

    def read(module: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, Any]:
        return given, {n: _numbers(v, table) if n in _IDS else v for n, v in named.items()}

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


def _numbers(ids: Tensor, table: Tensor) -> Tensor:
    return table.to(ids.device)[ids]


def _words(config: Any) -> int:
    return int(getattr(config, "decoder_vocab_size", None) or config.vocab_size)
