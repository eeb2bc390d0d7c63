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
    "The cat sat.", "An  apple, a day", "no idea", "", "Der Hund läuft", "same same other", "a the",
]  # fmt: skip
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


def test_normalization_equals_squad():
    for text in (*PREDICTIONS, "A. An! the-the 'a", "U.S.A. (the)", "theory an"):
        assert normalize_answer(text) == _squad_normalize(text)


def test_scores_equal_squad():
    scores = score_texts(["exact_match", "token_f1"], PREDICTIONS, REFERENCES)
    pairs = list(zip(PREDICTIONS, REFERENCES, strict=True))
    hits = [max(_squad_normalize(p) == _squad_normalize(r) for r in refs) for p, refs in pairs]
    f1 = [max(_squad_f1(p, r) for r in refs) for p, refs in pairs]
    assert scores["exact_match"].value == pytest.approx(100 * sum(hits) / len(hits))
    assert scores["token_f1"].value == pytest.approx(100 * sum(f1) / len(f1))
    assert 0 < scores["exact_match"].value < scores["token_f1"].value < 100
    assert scores["exact_match"].chance == scores["token_f1"].chance == 0


def _squad_2_scores(prediction, gold):
    """Exact match and F1 of one question by SQuAD v2.0's evaluation script."""
    gold = [text for text in gold if _squad_normalize(text)] or [""]
    words, gold_words = _squad_normalize(prediction).split(), [_squad_normalize(g).split() for g in gold]
    f1 = [
        _squad_f1(prediction, text) if words and reference else int(words == reference)
        for text, reference in zip(gold, gold_words, strict=True)
    ]
    return max(int(words == reference) for reference in gold_words), max(f1)


def test_unanswerable_questions_are_scored_as_squad_2():
    # answered and right, answered without need, missed, only an article, references without words
    predictions = ["", "the cat", "", "the", "", "a cat sat"]
    references = [[""], [""], ["cat"], [""], ["a", "the"], ["cat sat", "dog"]]
    expected = [_squad_2_scores(p, r) for p, r in zip(predictions, references, strict=True)]
    assert expected == [(1, 1), (0, 0), (0, 0), (1, 1), (1, 1), (1, 1)]
    scores = score_texts(["exact_match", "token_f1"], predictions + PREDICTIONS, references + REFERENCES)
    expected += [_squad_2_scores(p, r) for p, r in zip(PREDICTIONS, REFERENCES, strict=True)]
    assert scores["exact_match"].value == pytest.approx(100 * np.mean([exact for exact, _ in expected]))
    assert scores["token_f1"].value == pytest.approx(100 * np.mean([f1 for _, f1 in expected]))
    assert {score.chance for score in scores.values()} == {100 * 3 / 13}
    # of version 1.1, the same prediction and reference without words have F1 0
    assert score_texts(["token_f1"], [""], [["the"]])["token_f1"].value == 0


def test_exact_match_uses_wilson_interval_and_mcnemar_test():
    [score] = score_texts(["exact_match"], PREDICTIONS, REFERENCES).values()
    hits = sum(right for right, _ in score.statistics.rows)
    assert score.ci95 == wilson_interval(hits, len(PREDICTIONS)) == metric_interval(score.statistics)
    other = score_texts(["exact_match"], [r[0] for r in REFERENCES], REFERENCES)["exact_match"]
    test = compare_steps(other.statistics, score.statistics)
    num_missed = len(PREDICTIONS) - hits
    assert test["p_value"] == pytest.approx(2 * 0.5**num_missed)
    assert test["difference"] == pytest.approx(100 * num_missed / len(PREDICTIONS))


@pytest.mark.parametrize("metric", ["exact_match", "token_f1"])
def test_equal_weights_reproduce_the_corpus_value(metric):
    [score] = score_texts([metric], PREDICTIONS, REFERENCES).values()
    assert metric_value(score.statistics) == pytest.approx(score.value)
    restored = Statistics.model_validate(score.statistics.dump())
    assert metric_value(restored) == score.value


def test_response_perplexity_is_the_mean_over_tokens():
    losses, tokens = [2.0, 3.0, 10.0, 1.0, 4.0, 2.5, 0.5], [2, 3, 5, 1, 4, 2, 1]
    [score] = score_responses(RESPONSE_METRICS, losses, tokens, [9] * 7, "x", 320).values()
    assert score.metric == "response_perplexity"
    assert score.value == pytest.approx(math.exp(np.sum(losses) / np.sum(tokens)))
    assert score.ci95[0] < score.value < score.ci95[1]
    assert (score.higher_is_better, score.chance, score.n) == (False, 320.0, 7)
    [better_score] = score_responses(
        RESPONSE_METRICS, [x / 2 for x in losses], tokens, [9] * 7, "x", 320
    ).values()
    test = compare_steps(better_score.statistics, score.statistics)
    assert test["difference"] == pytest.approx(better_score.value - score.value)
    assert test["p_value"] < 0.05


def test_response_perplexity_needs_examples():
    with raises_code("empty-data", InputError):
        score_responses(RESPONSE_METRICS, [], [], [], "x", None)
