"""Agreement with the baseline's outputs, against sacrebleu and torch; the metric on single examples."""

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sklearn.metrics import f1_score

from smelt.evaluate import step_agreement
from smelt.evaluate.label_quality import score_label_sets
from smelt.evaluate.quality import score_agreement, score_texts
from smelt.evaluate.significance import example_values, wilson_interval
from smelt.evaluate.step_agreement import compare_outputs, pack_logits, unpack_logits

pytestmark = pytest.mark.quick

ENGLISH = (["a cat sat down", "two dogs ran", ""], ["a cat sat there", "two dogs ran", "it rains"])
CHINESE = (["猫坐在垫子上。", "狗跑了"], ["猫坐在椅子上。", "狗跑了"])


@pytest.mark.parametrize(("texts", "tokenize"), [(ENGLISH, "13a"), (CHINESE, "zh")])
def test_text_agreement_equals_sacrebleu_against_baseline(texts, tokenize):
    step_texts, base = texts
    agreement = compare_outputs({"predictions": step_texts}, {"predictions": base})
    bleu = BLEU(tokenize=tokenize)
    assert agreement["bleu"] == pytest.approx(bleu.corpus_score(step_texts, [base]).score)
    assert agreement["chrf"] == pytest.approx(CHRF().corpus_score(step_texts, [base]).score)
    assert agreement["signatures"]["bleu"] == str(bleu.get_signature())
    assert (agreement["n"], agreement["equal"]) == (
        len(step_texts),
        pytest.approx(100 * (step_texts[1] == base[1]) / len(step_texts)),
    )
    score = score_agreement(step_texts, base, False, "k" * 20, step_texts)
    sentence_scores = [CHRF().sentence_score(a, [b]).score for a, b in zip(step_texts, base, strict=True)]
    assert (score.value, score.unit) == (pytest.approx(np.mean(sentence_scores)), "chrF")


def test_class_agreement_has_wilson_interval():
    """Agreement of classes is a share: what is not equal is 0, not a cosine of -1."""
    score = score_agreement(["a"] * 300, ["a"] * 300, True, "k", ["x"])
    assert score.ci95 == pytest.approx(wilson_interval(300, 300))


@pytest.mark.parametrize("multi_label", [False, True])
def test_class_kl_divergence_equals_torch(multi_label, monkeypatch):
    import torch
    from torch.nn import functional

    base, step_logits = (
        np.random.default_rng(seed).normal(0, 3, (7, 4)).astype(np.float32) for seed in (0, 1)
    )
    names = list("abcd")

    def score(logits):
        sets = [[names[i] for i in np.flatnonzero(row > 0)] for row in logits]
        tops = [names[i] for i in logits.argmax(1)]
        return {"predictions": sets if multi_label else tops, "labels": names, "logits": pack_logits(logits)}

    p, q = (torch.from_numpy(side_logits).double() for side_logits in (base, step_logits))
    if multi_label:  # each label is a class of two
        p, q = (
            functional.logsigmoid(torch.stack([side_logits, -side_logits], dim=-1)) for side_logits in (p, q)
        )
    else:
        p, q = p.log_softmax(-1), q.log_softmax(-1)
    row_divergences = functional.kl_div(q, p, log_target=True, reduction="none").flatten(1).sum(1)
    agreement = compare_outputs(score(step_logits), score(base))
    assert (agreement["kl_divergence"], agreement["kl_n"]) == (
        pytest.approx(float(row_divergences.mean())),
        7,
    )
    assert "bleu" not in agreement
    assert np.array_equal(unpack_logits(pack_logits(step_logits)), step_logits)
    monkeypatch.setattr(step_agreement, "_MAX_STORED_LOGITS", 3 * 4)
    agreement = compare_outputs(score(step_logits), score(base))
    assert (agreement["kl_divergence"], agreement["kl_n"]) == (
        pytest.approx(float(row_divergences[:3].mean())),
        3,
    )


def test_class_agreement_counts_equal_classes_and_skips_numbers():
    step_classes, base = ["a", "b", "b", "a"], ["a", "b", "a", "a"]
    score = score_agreement(step_classes, base, True, "key", step_classes)
    assert (score.value, score.unit, score.n) == (75, "%", 4)
    assert score_agreement(["", "x"], ["", "x"], False, "key", step_classes).value == 100
    assert compare_outputs({"predictions": [0.5]}, {"predictions": [0.5]}) is None
    assert compare_outputs({"predictions": []}, {"predictions": []}) is None


def test_example_values_equal_sacrebleu_sentence_scores():
    step_texts, base = [*ENGLISH[0], "cat", "no match here"], [*ENGLISH[1], "cat", "it snows"]
    scores = score_texts(["bleu", "chrf"], step_texts, [[text] for text in base])
    for name, scorer in (("bleu", BLEU(effective_order=True)), ("chrf", CHRF())):
        sentence_scores = [scorer.sentence_score(a, [b]).score for a, b in zip(step_texts, base, strict=True)]
        assert example_values(scores[name].statistics) == pytest.approx(sentence_scores)


def test_label_set_example_values_equal_sklearn():
    predicted, gold = [[0, 2], [1], [], [0]], [[0], [1, 2], [], [2]]
    hot = [
        [[int(label in row) for label in range(3)] for row in label_sets] for label_sets in (gold, predicted)
    ]
    score = score_label_sets(["f1_micro"], predicted, gold, 3)["f1_micro"]
    row_scores = [100 * f1_score(*pair, zero_division=1) for pair in zip(*hot, strict=True)]
    assert example_values(score.statistics) == pytest.approx(row_scores)
