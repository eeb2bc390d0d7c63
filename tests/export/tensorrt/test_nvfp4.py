"""nvfp4 reaches engines: FLOAT4E2M1 and TRT_FP4DynamicQuantize in the file, FP4 in the network and engine."""

from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

from smelt.core.errors import InputError
from smelt.export.convert_to_half import convert_to_half
from smelt.export.graph_files import write_graph
from smelt.export.graphs.attention import GraphSpec
from smelt.export.graphs.export_graph import export_graph
from smelt.export.onnx_stage import tolerance_kind
from smelt.export.parity.references import make_dequantized_copy
from smelt.export.settings import OnnxSettings
from smelt.export.simplify_graph import expand_placeholders
from smelt.quantization.schemes.registry import SCHEMES
from tests.support import schemes
from tests.support.expected_errors import raises_code
from tests.support.graphs import graph_exports, tensorrt_graphs
from tests.support.pairs import matrix
from tests.support.processes import tensorrt_rig

WIDE = 1024
SHAPES = {"x": ((1, WIDE), (8, WIDE), (16, WIDE))}

# a classifier, a decoder alone with its cache, a translator with both kinds of caches
CASES = [
    ("bert", "nvfp4", "fp16"), ("llama", "nvfp4", "bf16"), ("marian", "nvfp4", "fp16"),
    ("llama", "nvfp4 weights", "fp16"),
]  # fmt: skip
if matrix.is_full_matrix():
    CODED = [family for family in tensorrt_graphs.GRAPH_COUNTS if family not in tensorrt_graphs.CONVOLUTIONAL]
    CASES = [
        (family, scheme, dtype)
        for family in CODED
        for scheme in ("nvfp4", "nvfp4 weights")
        for dtype in ("fp32", "fp16", "bf16")
    ]


@pytest.mark.parametrize(("family", "scheme", "dtype"), CASES)
def test_family_engines_build_with_fp4_matmuls(family: str, scheme: str, dtype: str) -> None:
    tensorrt_rig.rig_environment()
    exported = graph_exports.exported_graphs(family, scheme, "tensorrt", dtype)
    graphs = tensorrt_graphs.graphs_with_shapes(family, exported.folder)
    assert len(graphs) == tensorrt_graphs.GRAPH_COUNTS[family]
    for path, answer in zip(graphs, tensorrt_rig.build_all(graphs), strict=True):
        assert answer.get("bytes"), (path.name, answer)
        assert answer["warnings"] == []
        model = onnx.load(path)
        matrices = [t for t in model.graph.initializer if t.data_type == TensorProto.FLOAT4E2M1]
        quantizers = [node for node in model.graph.node if node.op_type == "TRT_FP4DynamicQuantize"]
        assert (len(quantizers) > 2) == (scheme == "nvfp4")
        assert len(matrices) > 2
        precisions = answer["network"]["precisions"]
        assert precisions["fp4"] == len(matrices) + len(quantizers) == precisions["fp8"]


def test_dequantized_copy_has_float_activations() -> None:
    folder = graph_exports.exported_graphs("llama", "nvfp4", "tensorrt", "bf16").folder
    with make_dequantized_copy(folder, ["model"], widen=True) as copy:
        operators = [node.op_type for node in onnx.load(copy / "model.onnx").graph.node]
    assert "TRT_FP4DynamicQuantize" not in operators
    # two for each matrix
    matrices = onnx.load(folder / "model.onnx").graph.initializer
    assert operators.count("DequantizeLinear") == 2 * sum(
        tensor.data_type == TensorProto.FLOAT4E2M1 for tensor in matrices
    )


def test_engine_stores_weights_in_four_bits(tmp_path: Path) -> None:
    tensorrt_rig.rig_environment()
    torch.manual_seed(0)
    linear_layers = [nn.Linear(WIDE, WIDE) for _ in range(3)]
    bits = {"activation_bits": 16}
    codes = [schemes.with_activation_range(layer, "nvfp4", bits) for layer in linear_layers]
    graphs = {write(tmp_path / "float.onnx", linear_layers): SHAPES}
    graphs[write(tmp_path / "nvfp4.onnx", codes)] = SHAPES
    float_engine, small_engine = tensorrt_rig.build_all(graphs)
    assert "fp4" not in float_engine["network"]["precisions"]
    saved_bytes = float_engine["bytes"] - small_engine["bytes"]
    assert saved_bytes > 0.9 * (16 - 4.5) / 8 * 3 * WIDE * WIDE, (float_engine, small_engine)


def write(path: Path, layers: list[nn.Module]) -> Path:
    module = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    module.attentions = ()  # type: ignore[assignment]
    graph = GraphSpec("model", module.eval(), (torch.ones(2, WIDE),), ["x"], ["y"], ({0: "rows"},))
    model = export_graph(graph, "tensorrt", 23)
    expand_placeholders(model)
    convert_to_half(model, "model")
    write_graph(model, path)
    return path


def test_four_axes_are_quantized_as_three(tmp_path: Path) -> None:
    """TensorRT quantizes tensors of two and three axes."""
    tensorrt_rig.rig_environment()
    layer = schemes.with_activation_range(nn.Linear(64, 16), "nvfp4")
    x = torch.randn(2, 3, 4, 64)
    model = schemes.export_layers([layer], x, "tensorrt", opset=23)
    onnx.save(model, tmp_path / "model.onnx")
    shape = tuple(x.shape)
    assert tensorrt_rig.build(tmp_path / "model.onnx", {"x": (shape, shape, shape)}).get("bytes")


def test_parser_reads_no_powers_of_two_as_scales(tmp_path: Path) -> None:
    """Why mxfp4 is refused; where this fails, it can be exported with the scales of its format."""
    tensorrt_rig.rig_environment()
    helper = onnx.helper
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node(
            "DequantizeLinear", ["w", "s"], ["f"], axis=0, block_size=32, output_dtype=TensorProto.FLOAT
        ),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    constants = [
        helper.make_tensor("w", TensorProto.FLOAT4E2M1, [64, 64], bytes(64 * 32), raw=True),
        helper.make_tensor("s", TensorProto.FLOAT8E8M0, [2, 64], bytes([127] * 128), raw=True),
    ]
    graph = helper.make_graph(
        nodes, "graph", [value("x", TensorProto.FLOAT, [2, 64])], [value("y", TensorProto.FLOAT, [2, 64])],
        constants,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 24)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=12), tmp_path / "model.onnx")
    shape = (2, 64)
    assert "error" in tensorrt_rig.build(tmp_path / "model.onnx", {"x": (shape, shape, shape)})
    assert "tensorrt" in SCHEMES["mxfp4"].unsupported_targets


@pytest.mark.parametrize("target", ["ort-cpu", "ort-cuda", "openvino", "ort-tensorrt"])
@pytest.mark.parametrize("bits", [4, 16])
def test_other_targets_are_rejected(target: str, bits: int) -> None:
    layer = schemes.with_activation_range(nn.Linear(64, 8), "nvfp4", {"activation_bits": bits})
    with raises_code("unsupported-scheme", InputError):
        tolerance_kind(nn.Sequential(layer), OnnxSettings.model_validate({"target": target}))
