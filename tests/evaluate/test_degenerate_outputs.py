"""Degenerate outputs are counted, and the verdict warns of them."""

import pytest

from smelt.evaluate.degenerate_outputs import count_degenerate, is_repetitive

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "text",
    [
        "to the the the",
        "I am a I am a I am a I am a",
        "!!!!!!!!!!!!",
        "hahahahahahahahaha",
        "的的的的的的的的的",
        "The answer is: the cat sat on the cat sat on the cat sat on the cat sat on",
    ],
)
def test_a_text_that_repeats_one_unit_is_repetitive(text):
    assert is_repetitive(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yes",
        "A man in a blue shirt stands on a ladder and cleans a window.",
        "It was a very, very, very long day at the end of which nobody knew what to say.",
        "1,000,000,000 people",
        "no, no",
        "一个男人站在梯子上清洁窗户。",
    ],
)
def test_a_usual_text_is_not_repetitive(text):
    assert not is_repetitive(text)


def test_each_kind_is_counted_and_a_quarter_is_degenerate():
    references = [[f"the answer {i}"] for i in range(8)]
    good = [f"an answer {i}" for i in range(8)]
    assert not count_degenerate(good, references, 1).is_degenerate
    looping = [*good[:6], "to the the the", "a b a b a b"]
    found = count_degenerate(looping, references, 0)
    assert (found.repetitive, found.not_ended, found.same, found.is_degenerate) == (2, 0, 0, True)
    assert count_degenerate(good, references, 8).is_degenerate
    same = count_degenerate(["I cannot."] * 7 + ["an answer"], references, 0)
    assert (same.same, same.is_degenerate) == (7, True)


def test_outputs_that_equal_their_references_are_not_degenerate():
    found = count_degenerate(["positive"] * 8 + ["ha ha ha"], [["positive"]] * 8 + [["ha ha ha"]], 0)
    assert (found.same, found.repetitive, found.is_degenerate) == (0, 0, False)


def test_four_outputs_are_too_few_to_call_degenerate():
    assert not count_degenerate(["x"] * 4, [["y"]] * 4, 4).is_degenerate
