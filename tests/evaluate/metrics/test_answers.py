"""Exact match, token F1 and response perplexity, against the published formulas."""

import collections
import math
import re
import string

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.evaluate.metrics.answers import normalize_answer
from smelt.evaluate.quality import score_responses, score_texts
from smelt.evaluate.significance import (
    Statistics,
    compare_steps,
    metric_interval,
    metric_value,
    wilson_interval,
)
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick
RESPONSE_METRICS = ["response_perplexity"]
PREDICTIONS = [
    "The cat sat.",
    "An  apple, a day",
    "no idea",
    "",
    "Der Hund läuft",
    "same same other",
    "a the",
]
REFERENCES = [
    ["cat sat"], ["apple day", "apple"], ["some idea", "I have no clue"], ["nothing"],
    ["Hund läuft schnell"], ["same other other"], ["the"],
]  # fmt: skip


def _squad_normalize(text):
    """The evaluation script of SQuAD v1.1, as published."""

    def remove_articles(text):
        return re.sub(r"\b(a|an|the)\b", " ", text)

    def white_space_fix(text):
        return " ".join(text.split())

    def remove_punc(text):
        exclude = set(string.punctuation)
        return "".join(ch for ch in text if ch not in exclude)

    return white_space_fix(remove_articles(remove_punc(text.lower())))


def _squad_f1(prediction, ground_truth):
    prediction_tokens = _squad_normalize(prediction).split()
    ground_truth_tokens = _squad_normalize(ground_truth).split()
    common = collections.Counter(prediction_tokens) & collections.Counter(ground_truth_tokens)
    num_same = sum(common.values())
    if num_same == 0:
        return 0
    precision = 1.0 * num_same / len(prediction_tokens)
    recall = 1.0 * num_same / len(ground_truth_tokens)
    return (2 * precision * recall) / (precision + recall)


def test_normalization_is_squads():
    for text in (*PREDICTIONS, "A. An! the-the 'a", "U.S.A. (the)", "theatre an"):
        assert normalize_answer(text) == _squad_normalize(text)


def test_scores_are_squads():
    found = score_texts(["exact_match", "token_f1"], PREDICTIONS, REFERENCES)
    pairs = list(zip(PREDICTIONS, REFERENCES, strict=True))
    hits = [max(_squad_normalize(p) == _squad_normalize(r) for r in refs) for p, refs in pairs]
    f1 = [max(_squad_f1(p, r) for r in refs) for p, refs in pairs]
    assert found["exact_match"].value == pytest.approx(100 * sum(hits) / len(hits))
    assert found["token_f1"].value == pytest.approx(100 * sum(f1) / len(f1))
    assert 0 < found["exact_match"].value < found["token_f1"].value < 100
    assert found["exact_match"].chance == found["token_f1"].chance == 0


def test_exact_match_has_wilsons_interval_and_mcnemars_test():
    [found] = score_texts(["exact_match"], PREDICTIONS, REFERENCES).values()
    hits = sum(right for right, _ in found.statistics.rows)
    assert found.ci95 == wilson_interval(hits, len(PREDICTIONS)) == metric_interval(found.statistics)
    other = score_texts(["exact_match"], [r[0] for r in REFERENCES], REFERENCES)["exact_match"]
    test = compare_steps(other.statistics, found.statistics)
    lost = len(PREDICTIONS) - hits
    assert test["p_value"] == pytest.approx(2 * 0.5**lost)
    assert test["difference"] == pytest.approx(100 * lost / len(PREDICTIONS))


@pytest.mark.parametrize("metric", ["exact_match", "token_f1"])
def test_equal_weights_give_the_value_on_all(metric):
    [found] = score_texts([metric], PREDICTIONS, REFERENCES).values()
    assert metric_value(found.statistics) == pytest.approx(found.value)
    again = Statistics.model_validate(found.statistics.dump())
    assert metric_value(again) == found.value


def test_response_perplexity_is_the_mean_over_tokens():
    losses, tokens = [2.0, 3.0, 10.0, 1.0, 4.0, 2.5, 0.5], [2, 3, 5, 1, 4, 2, 1]
    [found] = score_responses(RESPONSE_METRICS, losses, tokens, [9] * 7, "x", 320).values()
    assert found.metric == "response_perplexity"
    assert found.value == pytest.approx(math.exp(np.sum(losses) / np.sum(tokens)))
    assert found.ci95[0] < found.value < found.ci95[1]
    assert (found.higher_is_better, found.chance, found.n) == (False, 320.0, 7)
    [better] = score_responses(RESPONSE_METRICS, [x / 2 for x in losses], tokens, [9] * 7, "x", 320).values()
    test = compare_steps(better.statistics, found.statistics)
    assert test["difference"] == pytest.approx(better.value - found.value)
    assert test["p_value"] < 0.05


def test_response_perplexity_needs_examples():
    with raises_code("empty-data", InputError):
        score_responses(RESPONSE_METRICS, [], [], [], "x", None)
