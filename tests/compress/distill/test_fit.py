"""What is said of a student before torch is imported is what making it would say."""

from types import SimpleNamespace

import pytest
import tiny

from smelt.compress.distill.fit import STACKS, check_student
from smelt.compress.distill.logits import StudentSettings
from smelt.compress.distill.student import _stack, keep_layers
from smelt.core.errors import InputError
from smelt.look.model_folder import FAMILIES
from smelt.runtime.models.checkpoint import load_model


@pytest.mark.parametrize("kind", sorted(STACKS))
def test_the_names_in_the_configs_are_those_that_the_student_writes(kind):
    model = SimpleNamespace(config=SimpleNamespace(model_type=kind))
    for stack, key in STACKS[kind].items():
        assert _stack(model, stack)[1] == key
    for stack in {"encoder_layers", "decoder_layers", "layers"} - set(STACKS[kind]):
        with pytest.raises(InputError):
            _stack(model, stack)


def test_every_family_is_known():
    assert {kind for kinds in FAMILIES.values() for kind in kinds} == set(STACKS)


@pytest.mark.parametrize("choice", [1, 2, 3, [0], [1, 0], [0, 1], [2], [0, 0]])
def test_it_refuses_what_keep_layers_refuses(tmp_path, choice):
    model, edits = load_model(tiny.bert(tmp_path))
    found, after = check_student(StudentSettings(layers=choice), model.config.to_dict())
    try:
        _, kept = keep_layers(model, edits, "layers", choice, "spread")
    except InputError:
        assert len(found) == 1
    else:
        assert found == []
        assert after["num_hidden_layers"] == len(kept) == model.config.num_hidden_layers


def test_a_family_that_is_not_known_is_left_to_the_stage():
    config = {"model_type": "mamba"}
    assert check_student(StudentSettings(layers=1), config) == ([], config)
