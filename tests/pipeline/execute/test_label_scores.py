"""What is scored and printed of a classifier, against transformers' own pipeline."""

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from smelt.core.errors import InputError
from smelt.data.labels import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from smelt.data.splits import Example, Split
from smelt.evaluate.label_quality import score_classifier
from smelt.runtimes.predict_texts import class_logits
from smelt.runtimes.registry import open_runner
from smelt.runtimes.single_call_runners import predictions_from_logits
from smelt.tasks.classification import prediction_text
from tests.support.expected_errors import raises_code
from tests.support.models import classifiers, tiny

NAMES = classifiers.CLASS_NAMES
ID2LABEL = dict(enumerate(NAMES))


def outputs(folder, problem):
    labels = {"labels": 1} if problem == REGRESSION else {"labels": 3, "id2label": ID2LABEL}
    classifiers.distilbert(folder, seed=2, problem_type=problem, **labels)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    classify = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))
    with open_runner(tiny.as_artifact(folder, "text-classification")) as runner:
        logits = class_logits(runner, [Example(text) for text in tiny.SENTENCES])
        return runner.config, logits, [classify(text, top_k=None) for text in tiny.SENTENCES]


def printed(config, logits):
    return [prediction_text(prediction) for prediction in predictions_from_logits(logits, config)]


def test_single_label_output_equals_transformers_pipeline(tmp_path):
    config, logits, predictions = outputs(tmp_path, SINGLE_LABEL)
    expected = [f"{row[0]['label']}\t{row[0]['score']:.3f}" for row in predictions]
    assert printed(config, logits) == expected
    assert len({line.split("\t")[0] for line in expected}) > 1


def test_multi_label_output_has_labels_above_half_in_output_order(tmp_path):
    config, logits, predictions = outputs(tmp_path, MULTI_LABEL)
    expected = []
    for row in predictions:
        chances = {prediction["label"]: prediction["score"] for prediction in row}
        labels = [name for name in NAMES if chances[name] > 0.5]
        shown = [f"{chances[name]:.3f}" for name in labels]
        expected.append("|".join(labels or ["-"]) + "\t" + "|".join(shown or ["-"]))
    assert printed(config, logits) == expected
    assert len({line.count("|") for line in expected}) > 1


def test_regression_output_is_number(tmp_path):
    config, logits, predictions = outputs(tmp_path, REGRESSION)
    assert [float(line) for line in printed(config, logits)] == pytest.approx(
        [row[0]["score"] for row in predictions], abs=1e-4
    )


@pytest.mark.parametrize(("problem", "metric", "gold"), [
    (SINGLE_LABEL, "accuracy", lambda p: p), (MULTI_LABEL, "subset_accuracy", tuple),
    (REGRESSION, "pearson", lambda p: p),
])  # fmt: skip
def test_predictions_scored_against_themselves_give_100(tmp_path, problem, metric, gold):
    config, logits, _ = outputs(tmp_path, problem)
    empty = {SINGLE_LABEL: 0, MULTI_LABEL: (), REGRESSION: 0.0}[problem]
    rows = tuple(Example(text, label=empty) for text in tiny.SENTENCES)
    _, predicted = score_classifier([metric], config, logits, Split("x", rows))
    right = Split("x", tuple(Example("a", label=gold(value)) for value in predicted))
    scores, _ = score_classifier([metric], config, logits, right)
    assert scores[metric].value == pytest.approx(100)


def test_metric_of_other_problem_type_is_rejected(tmp_path):
    config, logits, _ = outputs(tmp_path, REGRESSION)
    rows = tuple(Example(text, label=1.0) for text in tiny.SENTENCES)
    with raises_code("unknown-metric", InputError) as excinfo:
        score_classifier(["accuracy"], config, logits, Split("x", rows))
    assert all(value in str(excinfo.value) for value in ("'accuracy'", "pearson, spearman, mse"))
