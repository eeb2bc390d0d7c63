"""Losses on the outputs of modules of arrays: the formulas, and outputs that cannot be compared."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from smelt.compress.distill.objective import array_loss_terms, require_equal_outputs
from smelt.compress.distill.settings import DistillSettings
from smelt.core.errors import InputError
from tests.support.expected_errors import raises_code


def outputs(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "boxes": torch.randn(3, 7, 4, generator=generator), "kind": torch.randn(3, 5, generator=generator)
    }  # fmt: skip


def weights(**losses):
    return (
        DistillSettings.model_validate({"losses": losses} if losses else {}).resolve_for_task("custom").losses
    )


def test_default_is_the_sum_of_mse_losses():
    student, teacher = outputs(0), outputs(1)
    (name, term), *others = array_loss_terms(student, teacher, weights(), 1.0).items()
    assert (name, others) == ("outputs", [])
    mse = torch.nn.MSELoss()
    expected = mse(student["boxes"], teacher["boxes"]) + mse(student["kind"], teacher["kind"])
    assert term.value == pytest.approx(float(expected), rel=1e-6)


def test_logits_are_hintons_divergence_over_the_last_axis():
    student, teacher = outputs(0), outputs(1)
    terms = array_loss_terms(student, teacher, weights(logits=2.0), 3.0)
    assert [*terms] == ["logits"]
    expected = 0.0
    for name, value in student.items():
        p, q = (F.softmax(x.double() / 3, dim=-1) for x in (teacher[name], value))
        expected += 2.0 * 9 * float((p * (p / q).log()).sum(-1).mean())
    assert float(terms["logits"].value) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("losses", "expected"), [
    ({}, (0.0, 1.0)), ({"logits": 1.0}, (1.0, None)), ({"outputs": 0.5, "logits": 2}, (2, 0.5)),
    ({"hidden_states": 1.0}, (0.0, None)),
])  # fmt: skip
def test_outputs_are_logits_only_if_logits_have_a_weight(losses, expected):
    resolved = weights(**losses)
    assert (resolved.logits, resolved.outputs) == expected


def test_teacher_with_other_outputs_is_refused():
    class Module:
        def __init__(self, size):
            self.size = size

        def example_inputs(self, count):
            return {"x": torch.zeros(count, 2)}

        def __call__(self, x):
            return SimpleNamespace(arrays={"output": torch.zeros(len(x), self.size)})

    require_equal_outputs(Module(3), Module(3))
    with raises_code("outputs-mismatch", InputError):
        require_equal_outputs(Module(3), Module(4))
