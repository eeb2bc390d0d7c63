"""One class of the labels of all teachers: each teacher defines the proportions of its own labels only."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from torch.nn import functional as F
from transformers import BertConfig

from smelt.compress.distill.ensembles import make_ensemble, restricted_divergence
from smelt.compress.distill.objective import DistillObjective
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.distill.teacher_labels import ModelLabels, combination_of, several_teacher_errors
from smelt.core.messages import message_codes
from smelt.data.labels import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from smelt.data.splits import Example, Split
from tests.support import harness
from tests.support.models import tiny

T = 2.0
GROUPS = [[3, 0], [1, 0, 2]]  # the teachers share label 0
SHORT = {"batch_size": 5, "learning_rate": 3e-3, "precision": "fp32", "dropout": 0.0, "num_evals": 1}


def logits(*shape, seed=0):
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cross_entropy_of_paper(student, teachers):
    """J(q) of Vongkulbhisal et al. 2019: -sum over i, l of p_i(l) log(q(l) / sum of q over L_i), and H(p)."""
    log_q = student / T - logsumexp(student / T, axis=1, keepdims=True)
    total = entropy = 0.0
    for sample in range(len(student)):
        for group, t in zip(GROUPS, teachers, strict=True):
            p = softmax(t[sample] / T)
            group_mass = sum(np.exp(log_q[sample, label]) for label in group)
            for column, label in enumerate(group):
                total -= p[column] * np.log(np.exp(log_q[sample, label]) / group_mass)
                entropy -= p[column] * np.log(p[column])
    return total / len(student), entropy / len(student)


def test_restricted_divergence_is_cross_entropy_of_paper_less_entropies():
    student, teachers = logits(6, 4), [logits(6, 2, seed=1), logits(6, 3, seed=2)]
    terms = {}
    loss = restricted_divergence(
        student, torch.cat(teachers, dim=1), GROUPS, temperature=T, logits_weight=0.7, terms=terms
    )
    cross_entropy, entropy = cross_entropy_of_paper(student.double().numpy(), [t.numpy() for t in teachers])
    assert float(loss) == pytest.approx(0.7 * T**2 * (cross_entropy - entropy), rel=1e-5)
    assert terms.keys() == {"logits"}
    assert float(terms["logits"]) == float(loss)


def test_reverse_divergence_weighs_by_student_distribution_over_labels_of_teacher():
    student, teachers = logits(6, 4), [logits(6, 2, seed=1), logits(6, 3, seed=2)]
    loss = restricted_divergence(
        student, torch.cat(teachers, dim=1), GROUPS, temperature=T, logits_weight=0.0, reverse_weight=2.0
    )
    expected = 0.0
    for group, t in zip(GROUPS, teachers, strict=True):
        q, p = (student[:, group] / T).softmax(-1), (t / T).softmax(-1)
        expected += 2.0 * T**2 * float((q * (q / p).log()).sum(dim=1).mean())
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_teacher_gives_no_gradient_to_labels_it_lacks_or_to_their_sum():
    student = logits(6, 4).requires_grad_()
    restricted_divergence(
        student, logits(6, 2, seed=1), [[3, 0]], temperature=T, logits_weight=1.0
    ).backward()
    assert student.grad[:, [1, 2]].abs().max() == 0
    assert student.grad[:, [3, 0]].abs().min() > 1e-4
    torch.testing.assert_close(student.grad.sum(dim=1), torch.zeros(6), rtol=0, atol=1e-6)


def test_teacher_has_no_weight_for_samples_with_labels_it_lacks():
    student, teachers = logits(3, 4), logits(3, 5, seed=1)
    weights = {"temperature": T, "logits_weight": 1.0, "reverse_weight": 0.5}
    masked = restricted_divergence(student, teachers, GROUPS, torch.tensor([3, 1, 0]), **weights)
    parts = [  # labels 3 and 0 are those of the first teacher, 1 and 0 those of the second
        restricted_divergence(student[[i]], teachers[[i]][:, columns], [group], **weights)
        for i, columns, group in (
            (0, [0, 1], GROUPS[0]), (1, [2, 3, 4], GROUPS[1]),
            (2, [0, 1], GROUPS[0]), (2, [2, 3, 4], GROUPS[1]),
        )
    ]  # fmt: skip
    torch.testing.assert_close(masked, sum(parts) / 3)


def test_label_that_teacher_excludes_has_finite_divergences():
    excluded = torch.tensor([[float("-inf"), 0.0, 1.0]])
    student = torch.zeros(1, 3, requires_grad=True)
    loss = restricted_divergence(
        student, excluded, [[0, 1, 2]], temperature=1.0, logits_weight=1.0, reverse_weight=1.0
    )
    loss.backward()
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(student.grad).all())


def labels(*names, problem=SINGLE_LABEL, of_tokens=False):
    return ModelLabels(names, problem, of_tokens)


CATS, FRUIT, BOTH = labels("cat", "dog"), labels("apple", "banana"), labels("dog", "apple")
ALL = ("cat", "dog", "apple", "banana")


@pytest.mark.parametrize(("teachers", "student", "uses_labels", "combination"), [
    ([CATS, FRUIT], labels(*ALL), True, "restricted"),
    ([CATS, FRUIT], labels(*ALL), False, "concatenated"),
    ([CATS, FRUIT, BOTH], labels(*ALL), False, "restricted"),
    ([CATS, FRUIT], labels(*ALL, problem=MULTI_LABEL), True, "per-label"),
    ([CATS, labels("dog", "cat")], labels("cat", "dog"), True, "mean"),
])  # fmt: skip
def test_labels_define_how_outputs_are_combined(teachers, student, uses_labels, combination):
    assert several_teacher_errors(teachers, student, uses_labels=uses_labels) == []
    assert combination_of(teachers, student, uses_labels) == combination


SCORE = labels("good", problem=REGRESSION)


@pytest.mark.parametrize(("teachers", "student", "code"), [
    ([CATS, FRUIT, labels("dog", "cow")], labels(*ALL, "cow"), "unlinked-labels"),
    ([CATS, labels("apple", "banana", problem=MULTI_LABEL)], labels(*ALL), "single-label-student"),
    ([labels("O", "cat", of_tokens=True), labels("O", "dog", of_tokens=True)],
     labels("O", "cat", "dog", of_tokens=True), "single-label-student"),
    ([SCORE, SCORE], labels("good", "bad"), "problem-type-mismatch"),
    ([labels("good"), labels("good")], SCORE, "problem-type-mismatch"),
])  # fmt: skip
def test_outputs_that_define_no_single_label_are_rejected(teachers, student, code):
    assert message_codes(several_teacher_errors(teachers, student, uses_labels=False)) == [code]


class FixedClassifier(torch.nn.Module):
    """Returns the same logits for every input."""

    def __init__(self, names, values):
        super().__init__()
        self.config = BertConfig(
            id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}
        )
        self.values = torch.nn.Parameter(torch.tensor([values]))

    def can_generate(self):
        return False

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.values.expand(len(input_ids), -1))


def test_objective_adds_labels_of_all_teachers_to_restricted_divergences():
    cats, fruit = FixedClassifier(["cat", "dog"], [2.0, 0.0]), FixedClassifier(["apple", "dog"], [1.0, -1.0])
    student = FixedClassifier(["apple", "cat", "dog"], [0.5, -0.5, 1.0])
    settings = DistillSettings.model_validate({"temperature": T, "losses": {"logits": 2, "labels": 0.5}})
    teacher = make_ensemble([cats, fruit], ["cats", "fruit"], student, T)
    batch = {"input_ids": torch.zeros(3, 2, dtype=torch.int64), "labels": torch.tensor([0, 1, 2])}
    term = DistillObjective(teacher, settings)(student, batch)["outputs"]
    z = student.values.detach().expand(3, -1)
    divergence = sum(  # two of three samples have a label of the teacher
        2 / 3 * F.kl_div((z[:1, group] / T).log_softmax(-1), (t.values / T).softmax(-1), reduction="sum")
        for t, group in ((cats, [1, 2]), (fruit, [0, 2]))
    )
    expected = 2 * T**2 * divergence + 0.5 * F.cross_entropy(z, batch["labels"])
    torch.testing.assert_close(term.value, expected)
    assert {name: pytest.approx(float(value)) for name, value in term.components.items()} == {
        "logits": float(2 * T**2 * divergence.detach()),
        "labels": float(0.5 * F.cross_entropy(z, batch["labels"])),
    }  # fmt: skip


def test_without_labels_student_learns_one_distribution_over_stacked_logits():
    cats, fruit = (
        FixedClassifier(["cat", "dog"], [2.0, 0.0]),
        FixedClassifier(["apple", "fig"], [1.0, -1.0]),
    )
    student = FixedClassifier(["fig", "apple", "cat", "dog"], [0.0] * 4)
    teacher = make_ensemble([cats, fruit], ["cats", "fruit"], student, T, uses_labels=False)
    stacked = teacher(input_ids=torch.zeros(1, 1)).logits
    assert stacked.tolist() == [[-1.0, 1.0, 2.0, 0.0]]
    assert teacher.label_groups is None
    assert list(teacher.config.id2label.values()) == ["fig", "apple", "cat", "dog"]


def classifier(folder, names, seed):
    model_folder = tiny.write_bert(folder, seed=seed, labels=len(names))
    config = json.loads((model_folder / "config.json").read_text())
    config |= {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    (model_folder / "config.json").write_text(json.dumps(config))
    return model_folder


@pytest.mark.parametrize("cache", [{}, {"cache_logits": {}}])
def test_student_learns_proportions_of_two_teachers_and_classes_of_samples(cache, tmp_path):
    cats = classifier(tmp_path / "cats", ["cat", "dog"], 1)
    fruit = classifier(tmp_path / "fruit", ["apple", "fig", "dog"], 2)
    student = classifier(tmp_path / "m", ["apple", "cat", "dog", "fig"], 3)
    names = ["cat", "dog", "apple", "fig"]
    samples = [Example(text, label=names[i % 4]) for i, text in enumerate(tiny.SENTENCES)] * 2
    settings = DistillSettings.model_validate(
        SHORT | cache | {"teacher": [{"model": str(cats)}, {"model": str(fruit)}], "epochs": 60,
        "learning_rate": 1e-2, "losses": {"logits": 1, "labels": 0}}
    )  # fmt: skip
    ctx = harness.run_stage(
        Distill(), settings, student, tmp_path / "o/out", "text-classification",
        data=Split("x", tuple(samples)),
    )  # fmt: skip
    ids = torch.tensor([[2, 7, 9, 3], [2, 6, 8, 3]])
    output_model, *teachers = (
        harness.load_output_model(SimpleNamespace(out=folder)) for folder in (ctx.out, cats, fruit)
    )
    assert output_model.config.problem_type in (None, SINGLE_LABEL)
    with torch.no_grad():
        z, p_cats, p_fruit = (model(ids).logits for model in (output_model, *teachers))
    for group, p in (([1, 2], p_cats), ([0, 3, 2], p_fruit)):
        assert float((z[:, group].softmax(-1) - p.softmax(-1)).abs().mean()) < 0.1
