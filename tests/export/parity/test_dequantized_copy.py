import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.export import graph_files
from smelt.export.convert_to_half import convert_to_half
from smelt.export.parity.references import dequantize_graph, make_dequantized_copy, widen_to_float32
from smelt.runtimes.registry import open_folder
from tests.support.graphs import graph_exports


def run(model, **feeds):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


@pytest.mark.parametrize("zero", [None, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_quantized_matmul_becomes_float_matmul(zero, bias):
    random = np.random.default_rng(0)
    codes = random.integers(-127, 128, (6, 4)).astype(np.int8)
    scales = random.random(4).astype(np.float32)
    constants = {"codes": codes, "scales": scales, "zero": np.array(zero or 0, np.int8)}
    constants["bias"] = random.random(4).astype(np.float32)
    inputs = ["x", "codes", "scales", "" if zero is None else "zero", *(["bias"] if bias else [])]
    node = helper.make_node("DynamicQuantizeMatMul", inputs, ["y"], "product", domain="com.microsoft")
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
        [numpy_helper.from_array(v, n) for n, v in constants.items()],
    )  # fmt: skip
    domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    assert dequantize_graph(model) == 1
    assert model.graph.node[-1].name == "product"
    x = random.random((2, 6)).astype(np.float32)
    expected = x @ ((codes.astype(np.float32) - (zero or 0)) * scales) + (constants["bias"] if bias else 0)
    np.testing.assert_allclose(run(model, x=x), expected, rtol=1e-5)


def test_low_bit_matmul_uses_float_activations():
    model = onnx.load(graph_exports.exported_graphs("marian", "int4").folder / "encoder_model.onnx")
    levels = [a.i for n in model.graph.node for a in n.attribute if a.name == "accuracy_level"]
    assert set(levels) == {4}
    assert dequantize_graph(model) == len(levels)
    levels = [a.i for n in model.graph.node for a in n.attribute if a.name == "accuracy_level"]
    assert set(levels) == {0}


def test_half_tensors_are_widened_with_rounded_values():
    random = np.random.default_rng(0)
    weight = random.normal(size=(3, 4)).astype(np.float32)
    nodes = [
        helper.make_node("Cast", ["ids"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["f", "w"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("ids", TensorProto.INT64, [2, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [2, 4])],
        [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    convert_to_half(model, "model")
    assert model.graph.initializer[0].data_type == TensorProto.FLOAT16
    widen_to_float32(model)
    assert {t.data_type for t in model.graph.initializer} == {TensorProto.FLOAT}
    ids = random.integers(-5, 5, (2, 3))
    expected = ids.astype(np.float32) @ weight.astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(run(model, ids=ids), expected, rtol=1e-6)


@pytest.mark.parametrize("links", [True, False])
def test_dequantized_copy_is_loadable_and_removed_afterwards(links, tmp_path, monkeypatch):
    monkeypatch.setattr(graph_files, "MAX_INLINE_BYTES", 1000)
    if not links:
        monkeypatch.setattr(
            graph_files.os, "link", lambda *names: (_ for _ in ()).throw(OSError("no links here"))
        )
    exported = graph_exports.exported_graphs("marian", "int8")
    for name in ("encoder_model", "decoder_with_past_model"):
        graph_files.write_graph(onnx.load(exported.folder / f"{name}.onnx"), tmp_path / f"{name}.onnx")
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((exported.folder / name).read_bytes())
    names_before = sorted(p.name for p in tmp_path.iterdir())
    with make_dequantized_copy(tmp_path, ["encoder_model", "decoder_with_past_model"], widen=False) as folder:
        assert (folder / "encoder_model.onnx_data").is_file()
        with open_folder(folder, "onnx", "ort-cpu", 1) as runner:
            states = runner.encoder_outputs(exported.reference.batch)["last_hidden_state"]
    is_token = exported.reference.batch.attention_mask == 1
    assert np.abs(states - exported.reference.encoder_states)[is_token].mean() < 0.05
    assert sorted(p.name for p in tmp_path.iterdir()) == names_before
