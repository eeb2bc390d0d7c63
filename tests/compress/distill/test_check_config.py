"""What is said of a student before torch is imported is what making it would say."""

import json
from types import SimpleNamespace

import pytest

from smelt.compress.distill.check_config import STACK_NAMES, check_student
from smelt.compress.distill.settings import DistillSettings, StudentSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.drop_layers.layer_selection import _find_stack, keep_layers
from smelt.core.errors import InputError
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import FAMILIES
from tests.support.expected_errors import raises_code
from tests.support.models import tiny
from tests.support.models.every_family import TEXT_FAMILIES

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("kind", sorted(TEXT_FAMILIES))
def test_stack_names_of_each_family_are_valid_settings(kind):
    config = SimpleNamespace(model_type=kind, to_dict=lambda: {"model_type": kind})
    model = SimpleNamespace(config=config)
    names = {stack.name for stack in FAMILIES[kind].stacks({"model_type": kind})}
    assert names
    assert names <= set(STACK_NAMES)
    for name in set(STACK_NAMES) - names:
        with raises_code("unknown-stack", InputError) as caught:
            _find_stack(model, name, "distill", f"student.{name}")
        assert caught.value.setting == f"student.{name}"


@pytest.mark.parametrize("choice", [1, 2, 3, [0], [1, 0], [0, 1], [2], [0, 0]])
def test_check_student_rejects_same_layers_as_keep_layers(tmp_path, choice):
    model, edits = load_model(tiny.write_bert(tmp_path))
    errors, after = check_student(StudentSettings(layers=choice), model.config.to_dict())
    try:
        _, kept_layers = keep_layers(
            model, edits, "layers", choice, "uniform", stage="distill", prefix="student."
        )
    except InputError:
        assert len(errors) == 1
    else:
        assert errors == []
        assert after["num_hidden_layers"] == len(kept_layers) == model.config.num_hidden_layers


def test_unknown_family_is_not_checked_before_loading():
    config = {"model_type": "mamba"}
    assert check_student(StudentSettings(layers=1), config) == ([], config)


def bert_config(labels=None, architecture="BertForSequenceClassification", **more):
    config = {"model_type": "bert", "architectures": [architecture], "num_hidden_layers": 2, **more}
    return config | ({"id2label": {str(i): name for i, name in enumerate(labels)}} if labels else {})


@pytest.mark.parametrize(("student", "teacher", "codes"), [
    (bert_config(["no", "yes"]), bert_config(["no", "yes"]), []),
    (bert_config(["no", "yes"]), bert_config(["yes", "no"]), ["labels-mismatch"]),
    (bert_config(["no", "yes"]), bert_config(["a", "b", "c"]), ["labels-mismatch"]),
    (bert_config(["0", "1"]), bert_config(), []),  # numbers of samples, names of transformers
    (bert_config(["0", "1"]), bert_config(["no", "yes"]), ["labels-mismatch"]),
    (bert_config(["a", "b"]), bert_config(["a", "b"], problem_type="multi_label_classification"),
     ["problem-type-mismatch"]),
    (bert_config(architecture="BertModel"), bert_config(["a", "b", "c"]), []),  # a new classifier
])  # fmt: skip
def test_plan_compares_labels_of_student_and_teacher(student, teacher, codes, tmp_path):
    """Of a teacher that is an earlier step, and of one in a folder."""
    errors = Distill.check_teachers(DistillSettings(), student, {"teacher": teacher})
    (tmp_path / "config.json").write_text(json.dumps(teacher))
    by_folder = DistillSettings.model_validate({"teacher": {"model": str(tmp_path)}})
    for messages in (errors, Distill.check_model(by_folder, student)[0]):
        assert [(message.code, message.setting) for message in messages] == [
            (code, "teacher") for code in codes
        ]
    external = DistillSettings.model_validate({"student": {"config": "student.json"}})
    assert Distill.check_teachers(external, student, {"teacher": teacher}) == []
