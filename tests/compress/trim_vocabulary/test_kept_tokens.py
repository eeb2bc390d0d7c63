"""Which words of a teacher are those of a student."""

import pytest

from smelt.compress.trim_vocabulary.select_tokens import (
    VOCABULARY_FILE,
    KeptTokens,
    compose_kept_tokens,
    map_to_teacher_tokens,
    read_kept_tokens,
    write_kept_tokens,
)
from smelt.core.errors import InputError
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


def _folders(tmp_path, **kept_by_folder):
    for name, kept_tokens in kept_by_folder.items():
        (tmp_path / name).mkdir()
        if kept_tokens is not None:
            write_kept_tokens(kept_tokens, tmp_path / name)
    return [tmp_path / name for name in kept_by_folder]


def test_kept_tokens_of_two_trims_refer_to_first_vocabulary():
    once = compose_kept_tokens(None, [1, 3, 5, 7], 10)
    assert once == KeptTokens(10, [1, 3, 5, 7])
    assert compose_kept_tokens(once, [0, 2], 4) == KeptTokens(10, [1, 5])


def test_student_tokens_map_to_full_or_less_trimmed_teacher(tmp_path):
    student, teacher, untrimmed = _folders(
        tmp_path, student=KeptTokens(10, [1, 5]), teacher=KeptTokens(10, [1, 3, 5]), whole=None
    )
    assert map_to_teacher_tokens(student, untrimmed, 2, 10) == [1, 5]
    assert map_to_teacher_tokens(student, teacher, 2, 3) == [0, 2]
    assert map_to_teacher_tokens(student, student, 2, 2) is None
    assert map_to_teacher_tokens(student, untrimmed, 2, 9) == [
        1,
        5,
    ]  # a whole vocabulary with fewer padding rows
    assert map_to_teacher_tokens(untrimmed, untrimmed, 10, 10) is None


@pytest.mark.parametrize(("mine", "sizes"), [("teacher", (3, 2)), ("whole", (10, 2)), ("student", (2, 5))])
def test_teacher_without_tokens_of_student_is_rejected(mine, sizes, tmp_path):
    student, teacher, untrimmed = _folders(
        tmp_path, student=KeptTokens(10, [1, 5]), teacher=KeptTokens(10, [1, 3, 5]), whole=None
    )
    folder = {"teacher": teacher, "whole": untrimmed, "student": student}[mine]
    with raises_code("vocabulary-mismatch", InputError):
        map_to_teacher_tokens(folder, untrimmed if mine == "student" else student, *sizes)


@pytest.mark.parametrize(
    "text", ['{"words": 3, "kept": [1, 0]}', '{"words": 3, "kept": [5]}', '{"kept": []}']
)
def test_damaged_file_is_rejected(text, tmp_path):
    (tmp_path / VOCABULARY_FILE).write_text(text)
    with raises_code("damaged-file", InputError) as caught:
        read_kept_tokens(tmp_path)
    assert caught.value.file == str(tmp_path / VOCABULARY_FILE)
