"""Scores of entities equal seqeval's, and combine the counts of sentences."""

import random

import numpy as np
import pytest
import seqeval.metrics as reference

from smelt.data.tags import TagScheme
from smelt.evaluate.label_quality import entity_scores
from smelt.evaluate.metrics.entities import ENTITY_F1
from smelt.evaluate.metrics.registry import DEFAULT_METRICS
from smelt.evaluate.quality import score_tags
from smelt.evaluate.significance import compare_steps, metric_value
from tests.support.expected_errors import raises_code

METRICS = ("entity_f1", "entity_precision", "entity_recall", "tag_accuracy")
# the example of seqeval's README
GOLD = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
PREDICTED = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
TAGS = ["O", "O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def random_tags(lengths, seed):
    draw = random.Random(seed)
    return [draw.choices(TAGS, k=length) for length in lengths]


def test_task_scores_these_metrics_by_default():
    assert DEFAULT_METRICS["token-classification"] == METRICS


def test_readme_example_of_seqeval():
    scores = score_tags(METRICS, PREDICTED, GOLD)
    assert scores["entity_f1"].value == pytest.approx(50)
    assert scores["tag_accuracy"].value == pytest.approx(80)
    report = {row["label"]: row for row in entity_scores(PREDICTED, GOLD, TagScheme())}
    assert (report["MISC"]["f1"], report["PER"]["f1"]) == (0, 100)


def test_values_equal_seqeval():
    lengths = [random.Random(1).randint(1, 12) for _ in range(300)]
    gold, predicted = random_tags(lengths, 2), random_tags(lengths, 3)
    predicted = [p if i % 3 else g for i, (p, g) in enumerate(zip(predicted, gold, strict=True))]
    scores = score_tags(METRICS, predicted, gold)
    for name, function in (("f1", "f1_score"), ("precision", "precision_score"), ("recall", "recall_score")):
        expected = 100 * getattr(reference, function)(gold, predicted)
        assert scores[f"entity_{name}"].value == pytest.approx(expected)
    assert scores["tag_accuracy"].value == pytest.approx(100 * reference.accuracy_score(gold, predicted))
    by_type = reference.classification_report(gold, predicted, output_dict=True)
    for row in entity_scores(predicted, gold, TagScheme()):
        expected = by_type[row["label"]]
        assert (row["n"], row["f1"] / 100) == (expected["support"], pytest.approx(expected["f1-score"]))


def test_interval_and_test_use_sentences():
    gold, lengths = random_tags([6] * 200, 4), [6] * 200
    worse = [t if i % 4 else g for i, (t, g) in enumerate(zip(random_tags(lengths, 5), gold, strict=True))]
    better = [t if i % 2 else g for i, (t, g) in enumerate(zip(random_tags(lengths, 5), gold, strict=True))]
    first, second = (score_tags(METRICS, tags, gold)["entity_f1"] for tags in (better, worse))
    assert first.n == 200
    assert first.ci95[0] < first.value < first.ci95[1]
    comparison = compare_steps(first.statistics, second.statistics)
    assert comparison["p_value"] < 0.01
    assert comparison["difference"] == pytest.approx(first.value - second.value)


def test_values_of_single_sentences():
    rows = np.asarray(score_tags(METRICS, PREDICTED, GOLD)["entity_f1"].statistics.rows, dtype=float)
    assert rows.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert ENTITY_F1.example_values(rows).tolist() == [0, 100]
    assert ENTITY_F1.example_values(np.zeros((1, 3))).tolist() == [100]  # neither has an entity


def test_changed_values_have_one_more_or_one_less_entity():
    rows = np.asarray([[2, 3, 4]], dtype=float)
    expected = [100 * 2 * h / (p + 4) for h, p in ((3, 3), (2, 4), (1, 2), (2, 2))]
    assert sorted(ENTITY_F1.changed_values(rows)) == pytest.approx(sorted(expected))


def test_no_entities_score_0_and_chance_is_the_most_frequent_tag():
    scores = score_tags(METRICS, [["O", "O"]], [["O", "B-A"]])
    assert [scores[name].value for name in METRICS] == [0, 0, 0, 50]
    assert scores["tag_accuracy"].chance == 50
    assert metric_value(scores["entity_f1"].statistics) == 0


def test_f1_of_parts_of_speech_is_the_accuracy():
    predicted, gold = [["NOUN", "NOUN", "VERB"], ["DET"]], [["NOUN", "ADJ", "VERB"], ["DET"]]
    scores = score_tags(METRICS, predicted, gold, scheme=TagScheme(joins=False))
    assert scores["entity_f1"].value == scores["tag_accuracy"].value == 75


def test_sentences_need_a_tag_for_each_word():
    with raises_code("count-mismatch"):
        score_tags(METRICS, [["O"]], [["O", "O"]])
