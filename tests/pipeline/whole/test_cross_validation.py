"""k-fold cross-validation: the division of the samples, the scores of the folds, and what is refused."""

import json
import statistics

import numpy as np
import pytest
from sklearn.metrics import accuracy_score
from sklearn.model_selection import StratifiedGroupKFold

from smelt.data.split_division import divide_folds
from smelt.data.splits import Example, Split
from tests.support import harness
from tests.support.expected_errors import command_error, raises_code
from tests.support.models import classifiers, tiny

TRAINING = """\
  - finetune: {max_steps: 2, batch_size: 4, num_evals: 0, learning_rate: 0.01}
    name: tuned
"""
RECIPE = f"""
model: m
task: text-classification
data: {{train: data.jsonl, test: data.jsonl}}
stages:
{TRAINING}  - quantize: {{scheme: int8-dynamic}}
    name: int8
baseline: tuned
score: {{folds: 3, latency: false, quality: [accuracy, f1]}}
"""


def test_folds_equal_scikit_learn_and_keep_equal_texts_together():
    texts = [f"text {i % 50}" for i in range(60)]
    labels = [i % 50 % 3 for i in range(60)]
    split = Split("t", tuple(Example(text, label=label) for text, label in zip(texts, labels, strict=True)))
    folds = divide_folds(split, 5, seed=3)
    texts_by_fold = [{e.text for e in fold.examples} for _, fold in folds]
    assert sorted(text for fold in texts_by_fold for text in fold) == sorted(set(texts))
    assert all(len(rest) + len(fold) == 60 for rest, fold in folds)
    assert all(
        not {e.text for e in rest.examples} & fold
        for (rest, _), fold in zip(folds, texts_by_fold, strict=True)
    )
    numbers = np.unique(texts, return_inverse=True)[1]
    expected_folds = StratifiedGroupKFold(5, shuffle=True, random_state=3).split(numbers, labels, numbers)
    assert sorted(len(fold) for _, fold in expected_folds) == sorted(len(fold) for _, fold in folds)
    for _, fold in folds:
        assert max(np.bincount([e.label for e in fold.examples])) <= 6
    numbers = Split("t", tuple(Example(str(i), label=float(i)) for i in range(9)))
    assert [len(fold) for _, fold in divide_folds(numbers, 3, seed=0)] == [3, 3, 3]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folds")
    classifiers.MAKERS["bert"](folder / "m", labels=3, id2label=dict(enumerate(classifiers.CLASS_NAMES)))
    rows = [
        {"text": f"{phrase} {i}", "label": classifiers.CLASS_NAMES[i % 3]}
        for i, phrase in enumerate(["the man", "a dog", "two boys", "one girl"] * 9)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE)
    harness.smelt("run", folder / "recipe.yaml", "--out", folder / "run", "--quiet", code=0)
    return folder


def test_each_training_sample_is_scored_once_by_model_not_trained_on_it(home):
    report = json.loads((home / "run" / "report.json").read_text())
    steps = {step["name"]: step for step in report["steps"]}
    folds = [json.loads((home / "run" / "folds" / str(k) / "report.json").read_text()) for k in (1, 2, 3)]
    assert sum(fold["recipe"]["rows"]["test"] for fold in folds) == 36
    assert all(fold["recipe"]["rows"]["train"] + fold["recipe"]["rows"]["test"] == 36 for fold in folds)
    for name in ("tuned", "int8"):
        scores = steps[name]["folds"]["accuracy"]
        accuracies = [
            next(s for s in fold["steps"] if s["name"] == name)["quality"]["accuracy"]["value"]
            for fold in folds
        ]
        assert scores["values"] == pytest.approx(accuracies)
        assert scores["mean"] == pytest.approx(statistics.fmean(accuracies))
        assert scores["std"] == pytest.approx(statistics.stdev(accuracies))
    assert steps["tuned"]["folds"]["accuracy"]["against_baseline"] is None
    keys = {next(s for s in fold["steps"] if s["name"] == "tuned")["key"] for fold in folds}
    assert len(keys | {steps["tuned"]["key"]}) == 4
    difference = steps["int8"]["folds"]["f1"]["against_baseline"]
    assert difference["ci95"] is None or difference["ci95"][0] <= difference["difference"]
    for page in ("report.md", "report.html"):
        assert "Cross-validation" in (home / "run" / page).read_text()


def test_differences_are_paired_over_samples_of_all_folds():
    from smelt.evaluate.quality import score_labels
    from smelt.evaluate.significance import summarize_folds

    draw = np.random.default_rng(0)
    gold, first_labels, other = (draw.integers(0, 2, (3, 40)) for _ in range(3))
    folds = [
        {
            name: {
                "accuracy": score_labels(["accuracy"], guess.tolist(), truth.tolist())[
                    "accuracy"
                ].statistics.dump()
            }
            for name, guess in (("base", first_guess), ("step", second_guess))
        }
        for truth, first_guess, second_guess in zip(gold, first_labels, other, strict=True)
    ]
    summary = summarize_folds(folds, "base")["step"]["accuracy"]
    expected = 100 * (
        accuracy_score(gold.ravel(), other.ravel()) - accuracy_score(gold.ravel(), first_labels.ravel())
    )
    assert summary["against_baseline"]["difference"] == pytest.approx(expected)
    assert summary["values"] == pytest.approx(
        [100 * accuracy_score(a, b) for a, b in zip(gold, other, strict=True)]
    )
    assert "step" not in summarize_folds([*folds, {"base": folds[0]["base"]}], "base")


TRANSLATION = f"""
model: m
task: translation
data: {{train: data.jsonl, test: data.jsonl}}
stages:
{TRAINING}
score: {{folds: 2, latency: false, quality: [bleu, rougeL, loss], generation: {{max_new_tokens: 3}}}}
"""


def test_folds_of_translation_score_each_text_once(tmp_path):
    tiny.write_marian(tmp_path / "m")
    tiny.write_pairs(tmp_path / "data.jsonl", 6)
    (tmp_path / "recipe.yaml").write_text(TRANSLATION)
    harness.smelt("run", tmp_path / "recipe.yaml", "--out", tmp_path / "run", "--quiet", code=0)
    step = json.loads((tmp_path / "run" / "report.json").read_text())["steps"][1]
    folds = [json.loads((tmp_path / "run/folds" / n / "report.json").read_text()) for n in ("1", "2")]
    assert sum(fold["recipe"]["rows"]["test"] for fold in folds) == 6
    for metric in ("bleu", "rougeL", "loss"):
        values = [fold["steps"][1]["quality"][metric]["value"] for fold in folds]
        assert step["folds"][metric]["values"] == pytest.approx(values)
        assert step["folds"][metric]["against_baseline"]["n"] == 6


@pytest.mark.parametrize(("changes", "code"), [
    ({TRAINING: "", "baseline: tuned": ""}, "nothing-trains"), ({"folds: 3": "folds: 1"}, "wrong-value"),
])  # fmt: skip
def test_folds_without_training_are_rejected(home, changes, code):
    text = RECIPE
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (home / "wrong.yaml").write_text(text)
    error = command_error(harness.smelt("plan", home / "wrong.yaml", code=2))
    assert [(message.code, message.setting) for message in error.messages] == [(code, "score.folds")]


def test_more_folds_than_texts_are_rejected():
    split = Split("t", tuple(Example("same", label=i % 2) for i in range(9)))
    with raises_code("too-few-samples"):
        divide_folds(split, 3, seed=0)
    rare = Split("t", tuple(Example(f"text {i}", label=i % 4) for i in range(8)))
    assert sorted(len(fold) for _, fold in divide_folds(rare, 5, seed=0)) == [1, 1, 2, 2, 2]
