"""TER against sacrebleu."""

import numpy as np
import pytest
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from smelt.evaluate.quality import score_texts
from smelt.evaluate.significance import compare_steps, example_values

WORDS = [*"abcdefghijklmnopq"]


def corpus(error, seed, n=120):
    rng = np.random.default_rng(seed)
    references = [" ".join(rng.choice(WORDS, size=rng.integers(4, 15))) for _ in range(n)]
    predictions = [
        " ".join(str(rng.choice(WORDS)) if rng.random() < error else token for token in text.split())
        for text in references
    ]
    return predictions, references


def test_value_interval_and_signature_equal_sacrebleu():
    predictions, references = corpus(0.3, 0)
    score = score_texts(["ter"], predictions, [[text] for text in references])["ter"]
    metric = TER()
    sacrebleu_score = metric.corpus_score(predictions, [references], n_bootstrap=1000)
    assert score.value == sacrebleu_score.score
    low, high = score.ci95
    assert (high - low) / 2 == pytest.approx(sacrebleu_score._ci, rel=0.05)
    assert score.signature == str(metric.get_signature())
    assert (score.unit, score.higher_is_better, score.chance) == ("TER", False, 100.0)


def test_several_references_and_empty_texts_equal_sacrebleu():
    predictions = ["the cat sat on the mat", "a dog ran home", "", "x", "on the mat the Cat sat."]
    references = [
        ["a cat sat on a mat", "the cat sat"], ["a dog ran home now"], ["no"], ["", "x y"], ["The cat sat."],
    ]  # fmt: skip
    columns = [[texts[0] for texts in references], ["the cat sat", None, None, "x y", None]]
    score = score_texts(["ter"], predictions, references)["ter"]
    assert score.value == TER().corpus_score(predictions, columns).score
    sentences = [TER().sentence_score(*pair).score for pair in zip(predictions, references, strict=True)]
    assert example_values(score.statistics).tolist() == sentences


def test_edits_of_empty_references_are_100_as_in_sacrebleu():
    for prediction in ("x y", ""):
        score = score_texts(["ter"], [prediction] * 2, [[""]] * 2)["ter"]
        assert score.value == TER().corpus_score([prediction] * 2, [["", ""]]).score


def test_paired_difference_and_p_value_agree_with_sacrebleu():
    (better_texts, references), (worse_texts, _) = corpus(0.25, 1), corpus(0.3, 1)
    steps = [
        score_texts(["ter"], texts, [[t] for t in references])["ter"] for texts in (better_texts, worse_texts)
    ]
    result = compare_steps(*(step.statistics for step in steps))
    named_systems = [("worse", worse_texts), ("better", better_texts)]
    _, scores = PairedTest(named_systems, {"TER": TER()}, [references], test_type="ar", n_samples=10_000)()
    assert result["difference"] == pytest.approx(scores["TER"][1].score - scores["TER"][0].score)
    assert result["difference"] < 0
    sacrebleu_p = scores["TER"][1].p_value  # without swaps whose difference equals the observed one
    assert 0.01 < sacrebleu_p < result["p_value"] < sacrebleu_p + 0.02
