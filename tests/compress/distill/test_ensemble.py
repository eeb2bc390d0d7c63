"""Several teachers as one: means of probabilities by torch, labels that only one of them knows."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig

from smelt.compress.distill.ensembles import average_logits, combine_label_logits, make_ensemble
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.core.errors import InputError
from smelt.data.labels import MULTI_LABEL, SINGLE_LABEL
from smelt.data.splits import Example, Split
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import tiny

T = 2.0
SHORT = {"batch_size": 5, "learning_rate": 3e-3, "precision": "fp32", "dropout": 0.0, "num_evals": 1}


def logits(*shape, seed=0):
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_ensemble_averages_probabilities_not_logits():
    first, other = logits(4, 7), logits(4, 7, seed=1)
    expected = ((first / T).softmax(-1) + (other / T).softmax(-1)) / 2
    probabilities = (average_logits([first, other], T) / T).softmax(-1)
    torch.testing.assert_close(probabilities, expected, rtol=1e-5, atol=1e-7)
    of_logits = ((first + other) / (2 * T)).softmax(-1)
    assert float((probabilities - of_logits).abs().max()) > 0.05


def test_shared_labels_are_averaged_and_others_copied():
    first, other = logits(5, 2), logits(5, 3, seed=1)
    probabilities = (
        combine_label_logits([first, other], [[0, 1], [1, 2, 3]], 4, [SINGLE_LABEL, MULTI_LABEL], T) / T
    ).sigmoid()
    p, q = (first / T).softmax(-1), (other / T).sigmoid()
    expected = torch.stack([p[:, 0], (p[:, 1] + q[:, 0]) / 2, q[:, 1], q[:, 2]], dim=1)
    torch.testing.assert_close(probabilities, expected, rtol=1e-5, atol=1e-6)


def test_saturated_teacher_gives_finite_logits():
    sure = torch.tensor([[900.0, -900.0], [-30.0, 30.0]])
    label_logits = combine_label_logits([sure, sure], [[0, 1], [2, 3]], 4, [SINGLE_LABEL, MULTI_LABEL], 1.0)
    assert bool(torch.isfinite(label_logits).all())
    assert float(label_logits[1, 3]) == pytest.approx(30.0, abs=1e-3)  # no float32 says 1 - e^-30


class Says:
    """A classifier that always says the same."""

    def __init__(self, labels, values, kind=SINGLE_LABEL):
        names = dict(enumerate(labels))
        self.config = BertConfig(id2label=names, label2id={n: i for i, n in names.items()}, problem_type=kind)
        self.values = torch.tensor([values])

    def can_generate(self):
        return False


def test_labels_in_different_order_are_averaged_by_name():
    first, other = Says(["a", "b"], [3.0, 0.0]), Says(["b", "a"], [0.0, 3.0])
    student = Says(["b", "a"], [0.0, 0.0])
    ensemble = joined_of([first, other], student)
    probabilities = ensemble.join([first.values, other.values]).softmax(-1)
    expected = first.values.softmax(-1).flip(-1)
    torch.testing.assert_close(probabilities, expected)
    assert list(ensemble.config.id2label.values()) == ["b", "a"]


def joined_of(models, student):
    import smelt.compress.distill.ensembles as module

    class Plain(SimpleNamespace):
        pass

    before, module.Ensemble = module.Ensemble, lambda models, join, *more: Plain(join=join, config=more[0])
    try:
        return make_ensemble(models, ["one", "other"], student, 1.0)
    finally:
        module.Ensemble = before


@pytest.mark.parametrize(("labels", "kind", "code", "named"), [
    (["a", "b", "c"], MULTI_LABEL, "labels-mismatch", "'d'"),
    (["a", "b", "c", "d", "e"], MULTI_LABEL, "untaught-labels", "'e'"),
    (["a", "b", "c", "d"], SINGLE_LABEL, "single-label-student", '["a", "d"]'),
])  # fmt: skip
def test_student_with_incompatible_labels_is_rejected(labels, kind, code, named):
    teachers = [Says(["a", "b"], [0.0, 0.0]), Says(["c", "d"], [0.0, 0.0], MULTI_LABEL)]
    with raises_code(code, InputError) as caught:
        joined_of(teachers, Says(labels, [0.0] * len(labels), kind))
    assert named in str(caught.value)


def classifier(folder, names, seed, **more):
    model_folder = tiny.write_bert(folder, seed=seed, labels=len(names), **more)
    config = json.loads((model_folder / "config.json").read_text())
    config |= {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    (model_folder / "config.json").write_text(json.dumps(config))
    return model_folder


def test_student_learns_labels_of_two_classifiers(tmp_path):
    first = classifier(tmp_path / "one", ["neg", "pos"], 1)
    other = classifier(tmp_path / "other", ["man", "cat", "dog"], 2)
    student = classifier(tmp_path / "m", ["cat", "dog", "man", "neg", "pos"], 3, problem_type=MULTI_LABEL)
    rows = Split("x", tuple(Example(text, label=("pos", "cat")) for text in tiny.SENTENCES * 2))
    options = SHORT | {"teacher": [{"model": str(first)}, {"model": str(other)}], "temperature": 1.0}
    settings = DistillSettings.model_validate(
        options
        | {"losses": {"logits": 1, "labels": 0}, "epochs": 60, "learning_rate": 1e-2, "cache_logits": {}}
    )
    ctx = harness.run_stage(
        Distill(), settings, student, tmp_path / "o/out", "text-classification", data=rows
    )
    start, *_, end = [validation["loss"] for validation in ctx.details["training"]["validations"]]
    assert end < 0.05 * start
    output_model = harness.load_output_model(ctx)
    ids = torch.tensor([[2, 7, 9, 3], [2, 6, 8, 3]])
    models = [harness.load_output_model(SimpleNamespace(out=folder)) for folder in (first, other)]
    with torch.no_grad():
        probabilities, p, q = output_model(ids).logits.sigmoid(), *(m(ids).logits.softmax(-1) for m in models)
    expected = torch.cat([q[:, [1, 2, 0]], p], dim=1)
    assert float((probabilities - expected).abs().mean()) < 0.15
    assert ctx.details["teacher"] == f"{first}, {other}"
    assert ctx.details["labels_by_teacher"] == [
        {"teacher": str(first), "labels": ["neg", "pos"]},
        {"teacher": str(other), "labels": ["man", "cat", "dog"]},
    ]


def test_two_translation_teachers_are_both_used(tmp_path):
    rows = tiny.read_pairs(tmp_path)
    source, other = tiny.write_marian(tmp_path / "m"), tiny.write_marian(tmp_path / "other", 1)
    losses = {}
    for name, teacher in (
        ("one", "model"),
        ("two", ["model", {"model": str(other)}]),
        ("same", ["model", "model"]),
    ):
        settings = DistillSettings.model_validate(
            SHORT | {"teacher": teacher, "max_steps": 1, "losses": {"logits": 1, "labels": 0}}
        )
        ctx = harness.run_stage(Distill(), settings, source, tmp_path / name / "out", data=rows)
        losses[name] = ctx.details["training"]["validations"][0]["loss"]
    assert losses["one"] == pytest.approx(0, abs=1e-5)  # the student is its own teacher
    assert losses["same"] == pytest.approx(0, abs=1e-4)
    assert losses["two"] > 0.1


@pytest.mark.parametrize(("options", "code", "named"), [
    ({"teacher": ["model", "model"], "losses": {"hidden_states": 1}}, "several-teachers", "hidden_states"),
    ({"teacher": ["model", "model"], "sequence_level": {}}, "missing-setting", "generator"),
    ({"teacher": []}, "missing-setting", "teacher"),
])  # fmt: skip
def test_unsupported_settings_with_several_teachers_are_rejected(options, code, named):
    with raises_setting_codes(code) as caught:
        DistillSettings.model_validate(options)
    assert named in caught.value.errors()[0]["msg"]


def test_teacher_list_yields_step_references_and_paths(tmp_path):
    settings = DistillSettings.model_validate({"teacher": ["tuned", {"model": "b"}]})
    assert settings.step_references() == {"teacher.0": "tuned"}
    assert settings.paths() == {("teacher", 1, "model"): "b"}
    assert settings.resolve_paths(tmp_path).paths() == {("teacher", 1, "model"): str(tmp_path / "b")}
    assert DistillSettings(teacher="tuned").step_references() == {"teacher": "tuned"}
    assert DistillSettings.model_validate({"teacher": {"model": "b"}}).paths() == {
        ("teacher", 0, "model"): "b"
    }
