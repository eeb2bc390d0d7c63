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
def test_text_repeating_one_unit_is_repetitive(text):
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
def test_ordinary_text_is_not_repetitive(text):
    assert not is_repetitive(text)


def test_quarter_of_degenerate_outputs_is_flagged():
    references = [[f"the answer {i}"] for i in range(8)]
    valid_outputs = [f"an answer {i}" for i in range(8)]
    assert not count_degenerate(valid_outputs, references, 1).is_degenerate
    looping = [*valid_outputs[:6], "to the the the", "a b a b a b"]
    counts = count_degenerate(looping, references, 0)
    assert (counts.repetitive, counts.not_ended, counts.same, counts.is_degenerate) == (2, 0, 0, True)
    assert count_degenerate(valid_outputs, references, 8).is_degenerate
    constant_counts = count_degenerate(["I cannot."] * 7 + ["an answer"], references, 0)
    assert (constant_counts.same, constant_counts.is_degenerate) == (7, True)


def test_outputs_equal_to_references_are_not_degenerate():
    counts = count_degenerate(["positive"] * 8 + ["ha ha ha"], [["positive"]] * 8 + [["ha ha ha"]], 0)
    assert (counts.same, counts.repetitive, counts.is_degenerate) == (0, 0, False)


def test_four_outputs_are_too_few_to_be_degenerate():
    assert not count_degenerate(["x"] * 4, [["y"]] * 4, 4).is_degenerate
