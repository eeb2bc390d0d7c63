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


def _folders(tmp_path, **kept):
    for name, one in kept.items():
        (tmp_path / name).mkdir()
        if one is not None:
            write_kept_tokens(one, tmp_path / name)
    return [tmp_path / name for name in kept]


def test_trimmed_twice_tells_of_the_first_vocabulary():
    once = compose_kept_tokens(None, [1, 3, 5, 7], 10)
    assert once == KeptTokens(10, [1, 3, 5, 7])
    assert compose_kept_tokens(once, [0, 2], 4) == KeptTokens(10, [1, 5])


def test_words_of_a_whole_teacher_and_of_one_that_was_trimmed_less(tmp_path):
    student, teacher, whole = _folders(
        tmp_path, student=KeptTokens(10, [1, 5]), teacher=KeptTokens(10, [1, 3, 5]), whole=None
    )
    assert map_to_teacher_tokens(student, whole, 2, 10) == [1, 5]
    assert map_to_teacher_tokens(student, teacher, 2, 3) == [0, 2]
    assert map_to_teacher_tokens(student, student, 2, 2) is None
    assert map_to_teacher_tokens(student, whole, 2, 9) == [1, 5]  # a whole vocabulary with fewer padding rows
    assert map_to_teacher_tokens(whole, whole, 10, 10) is None


@pytest.mark.parametrize(("mine", "sizes"), [("teacher", (3, 2)), ("whole", (10, 2)), ("student", (2, 5))])
def test_a_teacher_that_lacks_words_is_refused(mine, sizes, tmp_path):
    student, teacher, whole = _folders(
        tmp_path, student=KeptTokens(10, [1, 5]), teacher=KeptTokens(10, [1, 3, 5]), whole=None
    )
    folder = {"teacher": teacher, "whole": whole, "student": student}[mine]
    with raises_code("vocabulary-mismatch", InputError):
        map_to_teacher_tokens(folder, whole if mine == "student" else student, *sizes)


@pytest.mark.parametrize(
    "text", ['{"words": 3, "kept": [1, 0]}', '{"words": 3, "kept": [5]}', '{"kept": []}']
)
def test_a_damaged_file_is_refused(text, tmp_path):
    (tmp_path / VOCABULARY_FILE).write_text(text)
    with raises_code("damaged-file", InputError) as caught:
        read_kept_tokens(tmp_path)
    assert caught.value.file == str(tmp_path / VOCABULARY_FILE)
