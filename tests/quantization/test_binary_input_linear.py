"""Inputs of two values: what they are, their gradients, and where they cannot be."""

import pytest
import torch
from expected_errors import raises_code
from torch import nn

from smelt.compress.quantize.plan_layers import quantize_module
from smelt.core.errors import InputError
from smelt.models.edits import apply_edits
from smelt.quantization.binary_input_linear import MIN_INPUT_SCALE, BinaryInputs, binarize

CODES = {"op": "quantize", "scheme": "binary", "group_size": 32, "accuracy_level": 0}


def layer(signed, scale=0.7):
    torch.manual_seed(0)
    found = BinaryInputs(quantize_module(nn.Linear(48, 24), "binary"), signed)
    assert (found.in_features, found.out_features, found.weight) == (48, 24, None)
    found.scale.data.fill_(scale)
    found.shift.data.normal_(std=0.2)
    return found


def inputs(signed):
    x = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(1))
    return (x if signed else x.relu()).requires_grad_()


def published(x, a, b, signed):
    """The value of an input, and its slopes by x, a and b: as the published code has them for one bit.

    There is no shift in that function: a layer adds one to its input first, and ours is the negative of it.
    """
    q = (x - b) / a
    if signed:  # its Q_N and Q_P are -1 and 1, and what lies between takes the sign
        inside = not (q < -1 or q > 1)
        sign = 1.0 if q >= 0 else -1.0
        return sign * a, float(inside), sign, -float(inside)
    below, beyond = q < 0, q > 1  # Q_N 0, Q_P 1
    inside = not (below or beyond)
    slope = 0.0 if below else 1.0 if beyond else round(q) - q
    return min(max(round(q), 0), 1) * a, float(inside), slope, -float(inside)


@pytest.mark.parametrize("signed", [True, False])
def test_values_and_gradients_are_the_published_ones(signed):
    made, x = layer(signed), inputs(signed)
    seen = []
    made.coded.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    out = made(x)
    seen[0].retain_grad()
    out.sin().sum().backward()
    a, upstream = float(made.scale.detach()), seen[0].grad
    found = torch.tensor(
        [
            [published(v, a, b, signed) for v, b in zip(row, made.shift.tolist(), strict=True)]
            for row in x.detach().flatten(0, 1).tolist()
        ]
    ).reshape(*x.shape, 4)
    assert seen[0].detach().allclose(found[..., 0])
    assert set(seen[0].detach().unique().tolist()) == ({-made.scale.item(), made.scale.item()} if signed
        else {0.0, made.scale.item()})  # fmt: skip
    assert 0.2 < float(found[..., 1].mean()) < 0.9  # some gradients pass, some do not
    assert x.grad.allclose(upstream * found[..., 1], atol=1e-6)
    # LSQ's factor for an activation: one over the root of its features
    expected = (upstream * found[..., 2]).sum() / 48**0.5
    assert made.scale.grad.allclose(expected, rtol=1e-4)
    assert made.shift.grad.allclose((upstream * found[..., 3]).sum(dim=(0, 1)), atol=1e-5)


@pytest.mark.parametrize("signed", [True, False])
def test_without_gradients_it_computes_the_same(signed):
    made, x = layer(signed), inputs(signed)
    with torch.no_grad():
        assert made(x).equal(made(x.detach()))
        expected = made.coded(binarize(x, made.scale, made.shift, signed))
    assert made(x).detach().allclose(expected, atol=1e-5)


def test_ties_go_as_the_sign_of_weights_and_round_have_them():
    a, b = torch.tensor(0.5), torch.tensor([0.25])
    x = torch.tensor([[0.25], [0.5], [0.51], [0.2]])
    assert binarize(x, a, b, signed=True).flatten().tolist() == [0.5, 0.5, 0.5, -0.5]
    assert binarize(x, a, b, signed=False).flatten().tolist() == [0.0, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("signed", [True, False])
def test_a_scale_never_falls_below_the_least(signed):
    made, x = layer(signed, scale=-0.1), inputs(signed)
    assert float(
        binarize(x.detach(), made.scale.detach(), made.shift.detach(), signed).max()
    ) == pytest.approx(MIN_INPUT_SCALE)
    made(x).sum().backward()
    assert torch.isfinite(made.scale.grad)


@pytest.mark.parametrize(("signed", "times"), [(True, 2), (False, 4)])
def test_it_begins_from_what_it_is_fed(signed, times):
    """AlphaInit of the published code, for one bit: 2 mean |x| where values have signs, else 4 mean |x|."""
    made, x = layer(not signed), inputs(signed)
    made.init_scale(x.detach())
    assert made.signed is signed
    assert float(made.scale.detach()) == pytest.approx(times * float(x.detach().abs().mean()), rel=1e-5)
    assert made.shift.detach().eq(0).all()
    made.init_scale(torch.zeros(2, 48))
    assert float(made.scale.detach()) == pytest.approx(MIN_INPUT_SCALE)


def test_half_precision_stays_what_it_is():
    made, x = layer(True), inputs(True).detach().bfloat16()
    made.coded = nn.Identity()
    assert made(x.requires_grad_()).dtype == torch.bfloat16
    with torch.no_grad():
        assert made(x).dtype == torch.bfloat16


def test_its_edit_makes_room_for_it():
    model = nn.Module()
    with torch.device("meta"):
        model.a = nn.Linear(48, 24)
    place = {"op": "binary_inputs", "module": "a", "signed": False}
    apply_edits(model, [CODES | {"module": "a"}, place])
    assert isinstance(model.a, BinaryInputs)
    assert not model.a.signed
    assert model.a.shift.is_meta
    assert "{0, a}" in repr(model.a)


@pytest.mark.parametrize(
    ("module", "signed", "named"),
    [("a", 1, "signed 1"), ("a", "yes", "signed 'yes'"), ("b", True, "Linear")],
)
def test_an_edit_that_cannot_be_is_refused(module, signed, named):
    model = nn.ModuleDict({"a": quantize_module(nn.Linear(48, 24), "binary"), "b": nn.Linear(4, 4)})
    with raises_code("does-not-fit-model", InputError) as caught:
        apply_edits(model, [{"op": "binary_inputs", "module": module, "signed": signed}])
    assert isinstance(caught.value.__cause__, TypeError)
    assert named in str(caught.value.__cause__)
