"""The graph with int8 caches: what becomes of its attentions, and wirings that are refused."""

from onnx import TensorProto, helper

from smelt.core.errors import RunError
from smelt.export.graph_files import read_graph
from smelt.export.kv_cache import (
    cached_attentions,
    has_int8_caches,
    quantize_kv_cache,
    rotated_keys,
)
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts


def float_graph():
    return read_graph(exported_artifacts.exported_artifact("writer") / "model.onnx", values=False)


def test_only_caches_become_int8():
    float_model, int8_model = (
        float_graph(),
        read_graph(exported_artifacts.exported_artifact("int8-caches") / "model.onnx", values=False),
    )
    assert (has_int8_caches(float_model), has_int8_caches(int8_model)) == (False, True)
    caches = [
        v
        for v in (*int8_model.graph.input, *int8_model.graph.output)
        if v.name.startswith(("past_", "present."))
    ]
    assert len(caches) == 8
    assert {v.type.tensor_type.elem_type for v in caches} == {TensorProto.INT8}
    assert [n.op_type for n in float_model.graph.node] == [n.op_type for n in int8_model.graph.node]
    for old, new in zip(float_model.graph.node, int8_model.graph.node, strict=True):
        assert list(new.input)[: len(old.input)] == list(old.input)
        assert old.op_type == "GroupQueryAttention" or old == new
    assert rotated_keys(float_model) == {"present.0.key", "present.1.key"}
    gpt2 = read_graph(exported_artifacts.exported_artifact("gpt2") / "model.onnx", values=False)
    assert rotated_keys(gpt2) == set()  # whose positions are added to the words


def test_caches_without_matching_outputs_are_rejected():
    crossed = float_graph()
    nodes = [n for n in crossed.graph.node if n.op_type == "GroupQueryAttention"]
    nodes[0].input[3], nodes[1].input[3] = nodes[1].input[3], nodes[0].input[3]
    with raises_code("crossed-caches", RunError):
        quantize_kv_cache(crossed, {})
    other = float_graph()
    kind = helper.make_tensor_value_info("present.2.key", TensorProto.FLOAT, ["batch", 2, "total", 16])
    other.graph.output.append(kind)
    with raises_code("unsupported-cache", RunError):
        list(cached_attentions(other))
