"""fp8 reaches engines: float8 Q/DQ in the file, FP8 in the network, a byte per weight in the engine."""

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
from smelt.export.parity.references import make_dequantized_copy
from smelt.export.scheme_support import tolerance_kind
from smelt.export.settings import OnnxSettings
from smelt.export.simplify_graph import expand_placeholders
from tests.support import schemes
from tests.support.expected_errors import raises_code
from tests.support.graphs import graph_exports, tensorrt_graphs
from tests.support.pairs import matrix
from tests.support.processes import tensorrt_rig

WIDE = 1024
SHAPES = {"x": ((1, WIDE), (8, WIDE), (16, WIDE))}

# a classifier, a decoder alone with its cache, a translator with both kinds of caches
FAMILIES = ["bert", "llama", "marian"]
CASES = [("bert", "fp16"), ("llama", "fp16"), ("marian", "fp16"), ("llama", "bf16")]
if matrix.is_full_matrix():
    CODED = [family for family in tensorrt_graphs.GRAPH_COUNTS if family not in tensorrt_graphs.CONVOLUTIONAL]
    CASES = [(family, dtype) for family in CODED for dtype in ("fp32", "fp16", "bf16")]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_family_engines_build_with_fp8_matmuls(family: str, dtype: str) -> None:
    tensorrt_rig.rig_environment()
    exported = graph_exports.exported_graphs(family, "fp8", "tensorrt", dtype)
    graphs = tensorrt_graphs.graphs_with_shapes(family, exported.folder)
    assert len(graphs) == tensorrt_graphs.GRAPH_COUNTS[family]
    for path, answer in zip(graphs, tensorrt_rig.build_all(graphs), strict=True):
        assert answer.get("bytes"), (path.name, answer)
        assert answer["warnings"] == []
        model = onnx.load(path)
        matrices = [t for t in model.graph.initializer if t.data_type == TensorProto.FLOAT8E4M3FN]
        pairs = sum(node.op_type == "QuantizeLinear" for node in model.graph.node)
        assert pairs > 2
        assert answer["types"]["FP8"] == pairs + len(matrices) == answer["network"]["precisions"]["fp8"]


@pytest.mark.parametrize("rounding", [True, False])
def test_only_the_copy_that_rounds_keeps_quantized_activations(rounding: bool) -> None:
    folder = graph_exports.exported_graphs("llama", "fp8", "tensorrt", "fp16").folder
    with make_dequantized_copy(folder, ["model"], widen=True, rounding=rounding) as copy:
        operators = {node.op_type for node in onnx.load(copy / "model.onnx").graph.node}
    assert ("QuantizeLinear" in operators) == rounding


@pytest.mark.parametrize("half", [True, False])
def test_engine_stores_weights_in_one_byte(half: bool, tmp_path: Path) -> None:
    tensorrt_rig.rig_environment()
    torch.manual_seed(0)
    linear_layers = [nn.Linear(WIDE, WIDE) for _ in range(3)]
    codes = [schemes.with_activation_range(layer, "fp8") for layer in linear_layers]
    graphs = {write(tmp_path / "float.onnx", linear_layers, half): SHAPES}
    graphs[write(tmp_path / "fp8.onnx", codes, half)] = SHAPES
    float_engine, fp8_engine = tensorrt_rig.build_all(graphs)
    assert float_engine["types"].get("FP8", 0) == 0
    saved_bytes = float_engine["bytes"] - fp8_engine["bytes"]
    assert saved_bytes > 0.8 * (1 if half else 3) * 3 * WIDE * WIDE, (float_engine, fp8_engine)


def write(path: Path, layers: list[nn.Module], half: bool) -> Path:
    module = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    module.attentions = ()  # type: ignore[assignment]
    graph = GraphSpec("model", module.eval(), (torch.ones(2, WIDE),), ["x"], ["y"], ({0: "rows"},))
    model = export_graph(graph, "tensorrt", 21)
    expand_placeholders(model)
    if half:
        convert_to_half(model, "model")
    write_graph(model, path)
    return path


@pytest.mark.parametrize("target", ["ort-cpu", "ort-cuda", "openvino", "ort-tensorrt"])
def test_other_targets_are_rejected(target: str) -> None:
    layer = schemes.with_activation_range(nn.Linear(64, 8), "fp8")
    with raises_code("unsupported-scheme", InputError):
        tolerance_kind(nn.Sequential(layer), OnnxSettings.model_validate({"target": target}))
