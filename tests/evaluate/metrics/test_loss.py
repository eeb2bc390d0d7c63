"""The metric `loss` against the losses that transformers and torch compute."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from smelt.core.errors import RunError
from smelt.core.store import Store
from smelt.data.splits import Example, Split
from smelt.evaluate.label_quality import score_label_sets, score_regression
from smelt.evaluate.quality import score_labels, score_windows
from smelt.evaluate.significance import compare_steps
from smelt.generation.config import GenerationSettings
from smelt.pipeline.execute.scoring import Scorer
from tests.support.models import every_family, tiny

PAIRS = [
    ("a dog runs", "a man eats soup in the park"),
    ("two men", "a dog"),
    ("a man and a dog", "two dogs run"),
]


def _marian_loss(folder, source, target):
    """The loss of transformers on one pair, summed over its tokens, and their number."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer([source], text_target=[target], return_tensors="pt")
    with torch.no_grad():
        return float(model(**batch).loss) * batch["labels"].numel(), batch["labels"].numel()


@pytest.mark.parametrize("family", ["marian", "t5"])
def test_loss_of_translation_equals_transformers(family, tmp_path):
    folder = every_family.model_with_layers(family, 2)
    examples = tuple(Example(source, references=(target, "not scored")) for source, target in PAIRS)
    scorer = Scorer(Store(tmp_path), "translation", ["loss"], GenerationSettings(), 2, 1)
    score = scorer.score(tiny.as_artifact(folder, "translation"), Split("test", examples))
    sums, counts = zip(*(_marian_loss(folder, *pair) for pair in PAIRS), strict=True)
    assert score["quality"]["loss"]["value"] == pytest.approx(sum(sums) / sum(counts), rel=1e-4)
    assert score["quality"]["loss"]["n"] == len(PAIRS)
    assert not score["quality"]["loss"]["higher_is_better"]


def test_loss_of_windows_is_log_of_perplexity():
    scores = score_windows(["perplexity", "loss"], [4.0, 9.0], [2, 3], [5, 6], "w", "text", vocabulary=50)
    assert scores["loss"].value == pytest.approx(math.log(scores["perplexity"].value)) == 13 / 5
    assert scores["loss"].chance == pytest.approx(math.log(50))


def test_loss_of_other_windows_is_compared_unpaired():
    """Another tokenizer makes other windows, which must not stop a run."""
    one = score_windows(["loss"], [4.0, 9.0, 5.0], [2, 3, 4], [5, 6, 7], "w", "text")["loss"]
    other = score_windows(["loss"], [4.5, 9.0], [3, 4], [9, 9], "w", "text")["loss"]
    assert compare_steps(one.statistics, other.statistics)["difference"] == pytest.approx(18 / 9 - 13.5 / 7)


def test_loss_of_classes_equals_torch():
    logits = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    gold = [0, 1, 2, 0, 1, 0]
    score = score_labels(["loss"], logits.argmax(1).tolist(), gold, logits)["loss"]
    assert score.value == pytest.approx(float(F.cross_entropy(torch.tensor(logits), torch.tensor(gold))))


def test_loss_of_label_sets_equals_torch():
    logits = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    gold = [[0], [1, 2], [], [0, 1, 2]]
    hot = torch.tensor([[float(label in row) for label in range(3)] for row in gold])
    score = score_label_sets(["loss"], gold, gold, 3, logits)["loss"]
    assert score.value == pytest.approx(float(F.binary_cross_entropy_with_logits(torch.tensor(logits), hot)))


def test_loss_of_numbers_equals_torch():
    predicted, gold = [1.0, 2.5, -1.0], [0.5, 2.0, 1.0]
    score = score_regression(["loss"], predicted, gold)["loss"]
    assert score.value == pytest.approx(float(F.mse_loss(torch.tensor(predicted), torch.tensor(gold))))


def test_infinite_loss_of_translation_is_left_out_with_warning(monkeypatch, tmp_path):
    """Of a shortlist, which excludes tokens; the other metrics are scored."""
    monkeypatch.setattr("smelt.runtimes.predict_texts.target_nll", lambda *_: [1.0, math.inf, 2.0])
    folder = every_family.model_with_layers("marian", 2)
    examples = tuple(Example(source, references=(target,)) for source, target in PAIRS)
    generation = GenerationSettings(max_new_tokens=2)
    scorer = Scorer(Store(tmp_path), "translation", ["chrf", "loss"], generation, 2, 1)
    score = scorer.score(tiny.as_artifact(folder, "translation"), Split("test", examples))
    assert [*score["quality"]] == ["chrf"]
    assert "infinite-loss" in [message["code"] for message in score["warnings"]]


def test_loss_of_excluded_token_of_windows_is_an_error():
    with pytest.raises(RunError) as caught:
        score_windows(["loss"], [math.inf], [2], [5], "w", "text")
    assert caught.value.code == "non-finite-outputs"
