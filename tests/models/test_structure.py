"""A layer is replaced under all of its names, and the edits say so."""

import pytest
from torch import nn

from smelt.models.edits import apply_edits, module_names, replace_layer
from smelt.models.layers import LowRankLinear

pytestmark = pytest.mark.quick


def model():
    """Return `a` and `b`, one layer, `c`, another, and `d`, a part of its own that holds the first too."""
    module = nn.Module()
    module.a, module.c, module.d = nn.Linear(6, 4), nn.Linear(6, 4), nn.Module()
    module.b = module.d.e = module.a
    return module


def test_layer_is_replaced_under_all_of_its_names():
    edited, edits = model(), []
    other, new = edited.c, nn.Linear(6, 2)
    replace_layer(
        edited, edits, "a", new, {"op": "linear", "module": "a", "in_features": 6, "out_features": 2}
    )
    assert edited.a is edited.b is edited.d.e is new
    assert edited.c is other
    rebuilt = model()
    apply_edits(rebuilt, edits)
    assert rebuilt.a is rebuilt.b is rebuilt.d.e
    assert (rebuilt.a.out_features, rebuilt.c.out_features) == (2, 4)


def test_editing_shared_low_rank_layer_adds_one_edit():
    edited, edits = model(), []
    pair = LowRankLinear(6, 4, 2)
    replace_layer(edited, edits, "a", pair, {"op": "low_rank", "module": "a", "rank": 2})
    assert [(e["op"], e["module"]) for e in edits] == [("low_rank", "a"), ("share", "d.e"), ("share", "b")]
    half = nn.Linear(2, 3)
    sizes = {"in_features": 2, "out_features": 3}
    replace_layer(edited, edits, "a.up", half, {"op": "linear", "module": "a.up", **sizes})
    assert edited.b.up is half
    assert len(edits) == 4
    rebuilt = model()
    apply_edits(rebuilt, edits)
    assert rebuilt.d.e.up.out_features == 3


def test_layer_can_be_replaced_by_another_layer_of_model():
    edited, edits = model(), []
    replace_layer(edited, edits, "a", edited.c, {"op": "share", "module": "a", "with": "c"})
    assert edited.a is edited.b is edited.d.e is edited.c
    rebuilt = model()
    apply_edits(rebuilt, edits)
    assert rebuilt.a is rebuilt.b is rebuilt.d.e is rebuilt.c


def test_unknown_layer_is_not_replaced():
    with pytest.raises(AttributeError):
        replace_layer(model(), [], "z", nn.Linear(1, 1), {})


def test_module_names_lists_each_module_once_with_all_names():
    module = model()
    assert module_names(module) == {
        module: [""],
        module.a: ["a", "d.e", "b"],
        module.c: ["c"],
        module.d: ["d"],
    }
