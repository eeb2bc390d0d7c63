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
    scope = "layers.slice(None, 1, None).0"
    nodes = [
        scoped(helper.make_node("MatMul", ["x", "w"], ["u"], "up"), scope, f"{scope}.up"),
        scoped(helper.make_node("MatMul", ["u", "w"], ["d"], "down"), scope, f"{scope}.down"),
        helper.make_node("Identity", ["d"], ["same"], "optimizer"),
        scoped(helper.make_node("Add", ["x", "same"], ["s"], "sum"), scope),
        scoped(helper.make_node("Mul", ["s", "w"], ["n"], "norm"), scope, f"{scope}.norm"),
        scoped(helper.make_node("MatMul", ["n", "w"], ["v"], "next"), scope, f"{scope}.up"),
    ]
    value = helper.make_tensor_value_info
    signature = [value("x", TensorProto.FLOAT, [4])], [value("v", TensorProto.FLOAT, [4])]
    return helper.make_model(helper.make_graph(nodes, "g", *signature))


def test_nodes_are_mapped_to_modules(model, module):
    module_by_node = module_of_nodes(model, module)
    assert {module_by_node[name] for name in ("up", "u", "next")} == {"layers.0.up"}
    assert module_by_node["down"] == "layers.0.down"
    assert module_by_node["s"] == "layers.0"
    assert "optimizer" not in module_by_node


def test_nodes_of_replaced_forward_are_mapped_to_calling_module(module):
    """torch.export names a module that such a forward calls by its last word alone (Qwen3's `q_norm`)."""
    square = scoped(helper.make_node("Pow", ["x", "two"], ["p"], "square"), "layers.0", "norm")
    other = scoped(helper.make_node("Neg", ["p"], ["o"], "other"), "layers.0", "nothing")
    model = helper.make_model(helper.make_graph([square, other], "g", [], []))
    module_by_node = module_of_nodes(model, module)
    assert (module_by_node["square"], module_by_node["other"]) == ("layers.0.norm", "layers.0")
    assert "p" in select_fp32(model, module, module_by_node, None).nodes


def test_only_norms_are_kept_float32_without_overflow(model, module):
    module_by_node = module_of_nodes(model, module)
    for ranges in (None, ValueRanges({"d": FP16_SAFE_MAX, "same": FP16_SAFE_MAX}, {"d": FP16_MAX})):
        selection = select_fp32(model, module, module_by_node, ranges)
        assert (selection.nodes, selection.blocks, selection.norms) == ({"n"}, {}, {"layers.0.norm"})


def test_producers_and_consumers_of_overflow_are_kept_float32(model, module):
    ranges = ValueRanges({"d": 50000.0, "same": 50000.0, "s": 40000.0, "w": 1.0}, {"u": 1.0})
    selection = select_fp32(model, module, module_of_nodes(model, module), ranges)
    assert selection.nodes == {"d", "same", "s", "n"}
    assert selection.blocks == {"layers.0.down": 50000.0, "layers.0": 50000.0}
    assert selection.values == {"d", "same", "s"}


def test_sum_with_intermediate_overflow_is_kept_float32(model, module):
    ranges = ValueRanges({"u": 3.0}, {"u": FP16_MAX + 1})
    selection = select_fp32(model, module, module_of_nodes(model, module), ranges)
    assert selection.nodes == {"u", "n"}
    assert selection.blocks == {"layers.0.up": FP16_MAX + 1}


def test_nan_value_counts_as_overflow(model, module):
    selection = select_fp32(
        model, module, module_of_nodes(model, module), ValueRanges({"u": float("nan")}, {})
    )
    assert {"u", "d"} <= selection.nodes


def test_module_with_one_weight_vector_is_a_norm(module):
    assert is_norm_module(module, "layers.0.norm")
    assert not is_norm_module(module, "layers.0.up")
    assert not is_norm_module(module, "layers.0")
    assert not is_norm_module(module, "nothing.there")
    assert not is_norm_module(module, "")
