"""Agreement with the baseline's outputs, against sacrebleu and torch; the metric on single examples."""

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sklearn.metrics import f1_score

from smelt.evaluate import agreement
from smelt.evaluate.agreement import compare_outputs, pack_logits, score_agreement, unpack_logits
from smelt.evaluate.label_quality import score_label_sets
from smelt.evaluate.quality import score_texts
from smelt.evaluate.significance import example_values, wilson_interval

pytestmark = pytest.mark.quick

ENGLISH = (["a cat sat down", "two dogs ran", ""], ["a cat sat there", "two dogs ran", "it rains"])
CHINESE = (["猫坐在垫子上。", "狗跑了"], ["猫坐在椅子上。", "狗跑了"])


@pytest.mark.parametrize(("texts", "tokenize"), [(ENGLISH, "13a"), (CHINESE, "zh")])
def test_texts_agree_as_sacrebleu_scores_them_with_the_baselines_as_references(texts, tokenize):
    own, base = texts
    found = compare_outputs({"predictions": own}, {"predictions": base})
    bleu = BLEU(tokenize=tokenize)
    assert found["bleu"] == pytest.approx(bleu.corpus_score(own, [base]).score)
    assert found["chrf"] == pytest.approx(CHRF().corpus_score(own, [base]).score)
    assert found["signatures"]["bleu"] == str(bleu.get_signature())
    assert (found["n"], found["equal"]) == (len(own), pytest.approx(100 * (own[1] == base[1]) / len(own)))
    score = score_agreement(own, base, False, "k" * 20, own)
    each = [CHRF().sentence_score(a, [b]).score for a, b in zip(own, base, strict=True)]
    assert (score.value, score.unit) == (pytest.approx(np.mean(each)), "chrF")


def test_the_interval_of_equal_classes_is_wilsons():
    """Agreement of classes is a share: what is not equal is 0, not a cosine of -1."""
    score = score_agreement(["a"] * 300, ["a"] * 300, True, "k", ["x"])
    assert score.ci95 == pytest.approx(wilson_interval(300, 300))


@pytest.mark.parametrize("multi_label", [False, True])
def test_kl_divergence_of_classes_is_torchs(multi_label, monkeypatch):
    import torch
    from torch.nn import functional

    base, own = (np.random.default_rng(seed).normal(0, 3, (7, 4)).astype(np.float32) for seed in (0, 1))
    names = list("abcd")

    def score(logits):
        sets = [[names[i] for i in np.flatnonzero(row > 0)] for row in logits]
        tops = [names[i] for i in logits.argmax(1)]
        return {"predictions": sets if multi_label else tops, "labels": names, "logits": pack_logits(logits)}

    p, q = (torch.from_numpy(each).double() for each in (base, own))
    if multi_label:  # each label is a class of two
        p, q = (functional.logsigmoid(torch.stack([each, -each], dim=-1)) for each in (p, q))
    else:
        p, q = p.log_softmax(-1), q.log_softmax(-1)
    rows = functional.kl_div(q, p, log_target=True, reduction="none").flatten(1).sum(1)
    found = compare_outputs(score(own), score(base))
    assert (found["kl_divergence"], found["kl_n"]) == (pytest.approx(float(rows.mean())), 7)
    assert "bleu" not in found
    assert np.array_equal(unpack_logits(pack_logits(own)), own)
    monkeypatch.setattr(agreement, "_MAX_STORED_LOGITS", 3 * 4)
    found = compare_outputs(score(own), score(base))
    assert (found["kl_divergence"], found["kl_n"]) == (pytest.approx(float(rows[:3].mean())), 3)


def test_classes_agree_where_they_are_equal_and_numbers_are_not_compared():
    own, base = ["a", "b", "b", "a"], ["a", "b", "a", "a"]
    score = score_agreement(own, base, True, "key", own)
    assert (score.value, score.unit, score.n) == (75, "%", 4)
    assert score_agreement(["", "x"], ["", "x"], False, "key", own).value == 100
    assert compare_outputs({"predictions": [0.5]}, {"predictions": [0.5]}) is None
    assert compare_outputs({"predictions": []}, {"predictions": []}) is None


def test_values_of_single_examples_are_sacrebleus_of_sentences():
    own, base = [*ENGLISH[0], "cat", "no match here"], [*ENGLISH[1], "cat", "it snows"]
    scores = score_texts(["bleu", "chrf"], own, [[text] for text in base])
    for name, scorer in (("bleu", BLEU(effective_order=True)), ("chrf", CHRF())):
        each = [scorer.sentence_score(a, [b]).score for a, b in zip(own, base, strict=True)]
        assert example_values(scores[name].statistics) == pytest.approx(each)


def test_values_of_single_sets_of_labels_are_scikit_learns():
    own, gold = [[0, 2], [1], [], [0]], [[0], [1, 2], [], [2]]
    hot = [[[int(label in row) for label in range(3)] for row in rows] for rows in (gold, own)]
    score = score_label_sets(["f1_micro"], own, gold, 3)["f1_micro"]
    each = [100 * f1_score(*pair, zero_division=1) for pair in zip(*hot, strict=True)]
    assert example_values(score.statistics) == pytest.approx(each)
