"""What is said of a student before torch is imported is what making it would say."""

from types import SimpleNamespace

import pytest

from smelt.compress.distill.check_config import STACK_NAMES, check_student
from smelt.compress.distill.settings import StudentSettings
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
