"""Whatever an edit says, it is made or refused in words, in little memory."""

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from smelt.core.errors import InputError
from smelt.models.checkpoint import load_model
from smelt.models.edits import _OPS, apply_edits
from tests.support.expected_errors import raises_code
from tests.support.models import tiny

NUMBERS = st.sampled_from([0, 1, 2, 8, -1, 2**31, 2**70, 1.5, True, None, "8", [8]])
MODULES = st.sampled_from(
    ["a", "b", "c", "deep.a", "deep", "", ".", "deep.", "weight", "nothing", "a.weight", 7, None, []]
)
EDITS = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from([*_OPS, "run", "", None, [], {}]),
        "module": MODULES,
        "with": MODULES,
        "in_features": NUMBERS,
        "in_channels": NUMBERS,
        "out_channels": NUMBERS,
        "num_features": NUMBERS,
        "out_features": NUMBERS,
        "rank": NUMBERS,
        "ranks": st.lists(NUMBERS, max_size=3) | NUMBERS,
        "kind": st.sampled_from(["tucker", "cp", "svd", None]),
        "heads": NUMBERS,
        "part": NUMBERS,
        "keep": st.lists(NUMBERS, max_size=3) | NUMBERS,
        "value": NUMBERS,
        "group": NUMBERS,
        "bits": NUMBERS,
        "norm": MODULES,
        "attribute": st.sampled_from(
            ["num_heads", "all_head_size", "__class__", "forward", "training", None, 3]
        ),
        "scheme": st.sampled_from(["int8-dynamic", "int4", "int3", "ternary", "binary", "int9", None, 4]),
    },
)
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _model():
    model = nn.Module()
    with torch.device("meta"):
        model.a, model.b, model.deep = nn.Linear(8, 8), nn.Embedding(8, 8), nn.Module()
        model.deep.a, model.c = nn.Linear(8, 4, bias=False), nn.Conv2d(4, 8, 3)
        model.deep.b = nn.BatchNorm2d(8)
    model.num_heads = 2
    return model


@FUZZ
@given(st.lists(EDITS, max_size=3))
def test_random_edits_are_applied_or_rejected(edits):
    model = _model()
    # anything but an InputError ends the test
    with contextlib.suppress(InputError):
        apply_edits(model, edits)
    assert type(model) is nn.Module
    assert not callable(model.num_heads)


def test_excessive_low_rank_is_rejected():
    with raises_code("does-not-fit-model", InputError) as caught:
        apply_edits(_model(), [{"op": "low_rank", "module": "a", "rank": 10**12}])
    assert "1000000000000" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_excessive_convolution_ranks_are_rejected():
    edit = {"op": "low_rank_conv", "module": "c", "kind": "cp", "ranks": [10**12]}
    with raises_code("does-not-fit-model", InputError) as caught:
        apply_edits(_model(), [edit])
    assert "1000000000000" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("edit", [
    {"op": "conv", "module": "c", "in_channels": 10**12, "out_channels": 8},
    {"op": "conv", "module": "c", "in_channels": 4, "out_channels": 0},
    {"op": "batch_norm", "module": "deep.b", "num_features": 10**12},
    {"op": "batch_norm", "module": "c", "num_features": 4}, {"op": "fold", "module": "a", "norm": "deep.b"},
    {"op": "fold", "module": "c", "norm": "c"}, {"op": "round", "module": "c"},
])  # fmt: skip
def test_invalid_convolution_and_norm_edits_are_rejected(edit):
    with raises_code("does-not-fit-model", InputError):
        apply_edits(_model(), [edit])


def test_convolution_and_norm_edits_change_channels():
    model = _model()
    edit = {"op": "conv", "module": "c", "in_channels": 3, "out_channels": 5}
    apply_edits(model, [edit, {"op": "batch_norm", "module": "deep.b", "num_features": 5}])
    assert model.c.weight.shape == (5, 3, 3, 3)
    assert model.c.weight.is_meta
    assert model.deep.b.running_var.shape == model.deep.b.weight.shape == (5,)


@pytest.mark.parametrize(("edit", "code", "named"), [
    ({"op": "low_rnak", "module": "x"}, "unknown-edit", "'low_rank'"),
    ({"op": "low_rank", "module": "model.nothing", "rank": 2}, "does-not-fit-model", "model.nothing"),
    ({"op": "set", "module": "model.encoder", "attribute": "forward", "value": 3}, "does-not-fit-model",
     "'forward'"),
])  # fmt: skip
def test_unfitting_edits_are_explained(tmp_path, edit, code, named):
    model, _ = load_model(tiny.write_marian(tmp_path / "m"))
    with raises_code(code, InputError) as caught:
        apply_edits(model, [edit])
    assert named in str(caught.value)
