"""Which nodes stay float32: norms, what is too large, who reads it and who adds it up."""

import pytest
from onnx import TensorProto, helper
from torch import nn

from smelt.export.half_graphs import (
    FP16_MAX,
    FP16_SAFE_MAX,
    ValueRanges,
    is_norm_module,
    module_of_nodes,
    select_fp32,
)


def scoped(node, *scopes):
    entry = node.metadata_props.add()
    entry.key, entry.value = "pkg.torch.onnx.name_scopes", str(["", *scopes, node.output[0]])
    return node


@pytest.fixture
def module():
    block = nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    return nn.ModuleDict({"layers": nn.ModuleList([block])})


@pytest.fixture
def model():
    at = "layers.slice(None, 1, None).0"
    nodes = [
        scoped(helper.make_node("MatMul", ["x", "w"], ["u"], "up"), at, f"{at}.up"),
        scoped(helper.make_node("MatMul", ["u", "w"], ["d"], "down"), at, f"{at}.down"),
        helper.make_node("Identity", ["d"], ["same"], "optimizer"),
        scoped(helper.make_node("Add", ["x", "same"], ["s"], "sum"), at),
        scoped(helper.make_node("Mul", ["s", "w"], ["n"], "norm"), at, f"{at}.norm"),
        scoped(helper.make_node("MatMul", ["n", "w"], ["v"], "next"), at, f"{at}.up"),
    ]
    value = helper.make_tensor_value_info
    ends = [value("x", TensorProto.FLOAT, [4])], [value("v", TensorProto.FLOAT, [4])]
    return helper.make_model(helper.make_graph(nodes, "g", *ends))


def test_nodes_know_their_modules(model, module):
    homes = module_of_nodes(model, module)
    assert {homes[name] for name in ("up", "u", "next")} == {"layers.0.up"}
    assert homes["down"] == "layers.0.down"
    assert homes["s"] == "layers.0"
    assert "optimizer" not in homes


def test_what_a_replaced_forward_calls_is_found_from_where_it_is_called(module):
    """torch.export names a module that such a forward calls by its last word alone (Qwen3's `q_norm`)."""
    square = scoped(helper.make_node("Pow", ["x", "two"], ["p"], "square"), "layers.0", "norm")
    other = scoped(helper.make_node("Neg", ["p"], ["o"], "other"), "layers.0", "nothing")
    model = helper.make_model(helper.make_graph([square, other], "g", [], []))
    homes = module_of_nodes(model, module)
    assert (homes["square"], homes["other"]) == ("layers.0.norm", "layers.0")
    assert "p" in select_fp32(model, module, homes, None).nodes


def test_only_norms_stay_where_nothing_is_too_large(model, module):
    homes = module_of_nodes(model, module)
    for ranges in (None, ValueRanges({"d": FP16_SAFE_MAX, "same": FP16_SAFE_MAX}, {"d": FP16_MAX})):
        wide = select_fp32(model, module, homes, ranges)
        assert (wide.nodes, wide.blocks, wide.norms) == ({"n"}, {}, {"layers.0.norm"})


def test_who_gives_and_who_reads_a_value_stays_and_is_named_with_the_largest(model, module):
    ranges = ValueRanges({"d": 50000.0, "same": 50000.0, "s": 40000.0, "w": 1.0}, {"u": 1.0})
    wide = select_fp32(model, module, module_of_nodes(model, module), ranges)
    assert wide.nodes == {"d", "same", "s", "n"}
    assert wide.blocks == {"layers.0.down": 50000.0, "layers.0": 50000.0}
    assert wide.values == {"d", "same", "s"}


def test_a_sum_that_may_overflow_on_the_way_stays_though_its_result_is_small(model, module):
    ranges = ValueRanges({"u": 3.0}, {"u": FP16_MAX + 1})
    wide = select_fp32(model, module, module_of_nodes(model, module), ranges)
    assert wide.nodes == {"u", "n"}
    assert wide.blocks == {"layers.0.up": FP16_MAX + 1}


def test_a_value_that_is_no_number_is_too_large(model, module):
    wide = select_fp32(model, module, module_of_nodes(model, module), ValueRanges({"u": float("nan")}, {}))
    assert {"u", "d"} <= wide.nodes


def test_a_norm_is_what_has_one_row_of_weights(module):
    assert is_norm_module(module, "layers.0.norm")
    assert not is_norm_module(module, "layers.0.up")
    assert not is_norm_module(module, "layers.0")
    assert not is_norm_module(module, "nothing.there")
    assert not is_norm_module(module, "")
