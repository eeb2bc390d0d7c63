"""A layer is replaced under all of its names, and the edits say so."""

import pytest
from torch import nn

from smelt.models.edits import apply_edits, module_names, replace_layer
from smelt.models.layers import LowRankLinear

pytestmark = pytest.mark.quick


def model():
    """Return `a` and `b`, one layer, `c`, another, and `d`, a part of its own that holds the first too."""
    made = nn.Module()
    made.a, made.c, made.d = nn.Linear(6, 4), nn.Linear(6, 4), nn.Module()
    made.b = made.d.e = made.a
    return made


def test_layer_is_replaced_under_all_names_when_it_has_several():
    made, edits = model(), []
    other, new = made.c, nn.Linear(6, 2)
    replace_layer(made, edits, "a", new, {"op": "linear", "module": "a", "in_features": 6, "out_features": 2})
    assert made.a is made.b is made.d.e is new
    assert made.c is other
    again = model()
    apply_edits(again, edits)
    assert again.a is again.b is again.d.e
    assert (again.a.out_features, again.c.out_features) == (2, 4)


def test_half_of_a_shared_pair_is_one_edit_because_the_pair_is_one():
    made, edits = model(), []
    pair = LowRankLinear(6, 4, 2)
    replace_layer(made, edits, "a", pair, {"op": "low_rank", "module": "a", "rank": 2})
    assert [(e["op"], e["module"]) for e in edits] == [("low_rank", "a"), ("share", "d.e"), ("share", "b")]
    half = nn.Linear(2, 3)
    sizes = {"in_features": 2, "out_features": 3}
    replace_layer(made, edits, "a.up", half, {"op": "linear", "module": "a.up", **sizes})
    assert made.b.up is half
    assert len(edits) == 4
    again = model()
    apply_edits(again, edits)
    assert again.d.e.up.out_features == 3


def test_layer_that_stands_in_the_model_takes_the_place_of_another():
    made, edits = model(), []
    replace_layer(made, edits, "a", made.c, {"op": "share", "module": "a", "with": "c"})
    assert made.a is made.b is made.d.e is made.c
    again = model()
    apply_edits(again, edits)
    assert again.a is again.b is again.d.e is again.c


def test_unknown_layer_is_not_replaced():
    with pytest.raises(AttributeError):
        replace_layer(model(), [], "z", nn.Linear(1, 1), {})


def test_each_module_is_there_once_with_all_of_its_names():
    made = model()
    assert module_names(made) == {made: [""], made.a: ["a", "d.e", "b"], made.c: ["c"], made.d: ["d"]}
