"""The word that is proposed is one that was meant, or none."""

import pytest

from smelt.core.errors import InputError, did_you_mean

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("text", ["x" * 100_000, "\n".join(f"line {i}" for i in range(1000)), "short"])
def test_long_message_keeps_both_ends_when_wrapped_again(text):
    message = str(InputError(f"what is wrong: {text}"))
    wrapped = str(InputError(f"{message} how to mend it"))
    assert len(wrapped) < 4_000
    assert wrapped.startswith("what is wrong: ")
    assert wrapped.endswith(f"{text[-8:]} how to mend it")
    assert str(InputError(wrapped)) == wrapped


@pytest.mark.parametrize(("typo", "known", "meant"), [
    ("prnue", ["quantize", "prune"], "prune"), ("kep", ["keep"], "keep"), ("rnu", ["plan", "run"], "run"),
    ("blue", ["chrf", "bleu"], "bleu"), ("translate", ["summarization", "translation"], "translation"),
    ("BLEU", ["chrf", "bleu"], "bleu"), (" positive", ["negative", "positive"], "positive"),
    ("LABEL_O", ["LABEL_0"], "LABEL_0"), ("int8", ["int4", "int8-dynamic", "binary"], "int8-dynamic"),
    ("int8", ["bnb-int8", "int8-dynamic", "int8-static"], "int8-dynamic"),
    ("classification", ["text-classification"], "text-classification"),
    ("trian.jsonl", ["test.jsonl", "train.jsonl"], "train.jsonl"),
    ("x" * 10_000, ["x" * 10_000 + "y"], "x" * 10_000 + "y"),
])  # fmt: skip
def test_mistyped_word_gets_suggestion(typo, known, meant):
    assert did_you_mean(typo, known) == f" Did you mean '{meant}'?"


@pytest.mark.parametrize(("typo", "known"), [
    ("modernbert", ["bert", "roberta", "distilbert"]), ("negative", ["positive"]),
    ("rouge3", ["rouge1", "rouge2"]), ("LABEL_7", ["LABEL_0", "LABEL_1"]), ("en", ["de"]), ("a", ["b"]),
    ("", ["a"]), ("data", ["bleu"]), ("of", ["of-course"]),
    # it is there, and not what was wanted
    ("rows", ["rows"]),
])  # fmt: skip
def test_different_word_gets_no_suggestion(typo, known):
    assert not did_you_mean(typo, known)
