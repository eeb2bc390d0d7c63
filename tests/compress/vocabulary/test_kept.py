"""Which words of a teacher are those of a student."""

import pytest
from refusals import refused

from smelt.compress.vocabulary.kept import FILE, Kept, read_kept, same_words, trimmed_further, write_kept
from smelt.core.errors import InputError


def _folders(tmp_path, **kept):
    for name, one in kept.items():
        (tmp_path / name).mkdir()
        if one is not None:
            write_kept(one, tmp_path / name)
    return [tmp_path / name for name in kept]


def test_trimmed_twice_tells_of_the_first_vocabulary():
    once = trimmed_further(None, [1, 3, 5, 7], 10)
    assert once == Kept(10, [1, 3, 5, 7])
    assert trimmed_further(once, [0, 2], 4) == Kept(10, [1, 5])


def test_words_of_a_whole_teacher_and_of_one_that_was_trimmed_less(tmp_path):
    student, teacher, whole = _folders(
        tmp_path, student=Kept(10, [1, 5]), teacher=Kept(10, [1, 3, 5]), whole=None
    )
    assert same_words(student, whole, 2, 10) == [1, 5]
    assert same_words(student, teacher, 2, 3) == [0, 2]
    assert same_words(student, student, 2, 2) is None
    assert same_words(whole, whole, 10, 10) is None


@pytest.mark.parametrize(("mine", "sizes"), [("teacher", (3, 2)), ("whole", (10, 2)), ("student", (2, 9))])
def test_a_teacher_that_lacks_words_is_refused(mine, sizes, tmp_path):
    student, teacher, whole = _folders(
        tmp_path, student=Kept(10, [1, 5]), teacher=Kept(10, [1, 3, 5]), whole=None
    )
    folder = {"teacher": teacher, "whole": whole, "student": student}[mine]
    with refused("vocabulary-mismatch", InputError):
        same_words(folder, whole if mine == "student" else student, *sizes)


@pytest.mark.parametrize(
    "text", ['{"words": 3, "kept": [1, 0]}', '{"words": 3, "kept": [5]}', '{"kept": []}']
)
def test_a_damaged_file_is_refused(text, tmp_path):
    (tmp_path / FILE).write_text(text)
    with refused("damaged-file", InputError) as caught:
        read_kept(tmp_path)
    assert caught.value.file == str(tmp_path / FILE)
