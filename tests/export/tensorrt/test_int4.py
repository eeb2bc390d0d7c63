"""4-bit codes reach engines: in the file as they are, and in the bytes of the engine as 4 bits."""

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

from smelt.compress.quantize.plan_layers import quantize_module
from smelt.core.errors import InputError
from smelt.export.convert_to_half import convert_to_half
from smelt.export.graph_files import write_graph
from smelt.export.graphs.attention import GraphSpec
from smelt.export.graphs.export_graph import export_graph
from smelt.export.scheme_support import tolerance_kind
from smelt.export.settings import OnnxSettings
from smelt.export.simplify_graph import expand_placeholders
from smelt.quantization.schemes.registry import default_options, find_scheme
from tests.support.expected_errors import raises_code
from tests.support.graphs import graph_exports, tensorrt_graphs
from tests.support.pairs import matrix
from tests.support.processes import tensorrt_rig

WIDE = 1024

# a classifier, a decoder alone with its cache, a translator with both kinds of caches
FAMILIES = ["bert", "llama", "marian"]
CASES = matrix.matrix_cells(FAMILIES, ("fp16", "fp32")) if matrix.is_full_matrix() else [("marian", "fp16")]
if matrix.is_full_matrix():
    CODED = [
        family for family in tensorrt_graphs.GRAPH_COUNTS if family not in tensorrt_graphs.CONVOLUTIONAL
    ]  # which has no products to code
    CASES += [(family, "fp16") for family in CODED if family not in FAMILIES]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_family_engines_build_with_4_bit_weights(family: str, dtype: str) -> None:
    tensorrt_rig.rig_environment()
    exported = graph_exports.exported_graphs(family, "signed", "tensorrt", dtype)
    graphs = tensorrt_graphs.graphs_with_shapes(family, exported.folder)
    assert len(graphs) == tensorrt_graphs.GRAPH_COUNTS[family]
    assert exported.details["opset"] == 21
    for path, answer in zip(graphs, tensorrt_rig.build_all(graphs), strict=True):
        assert answer.get("bytes"), (path.name, answer)
        assert answer["warnings"] == []
        model = onnx.load(path)
        dtype_by_name = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
        codes = [n for n in model.graph.node if n.op_type == "DequantizeLinear"]
        assert len(codes) > 4
        assert {dtype_by_name[node.input[0]] for node in codes} == {TensorProto.INT4}
        half = {TensorProto.FLOAT16} if dtype == "fp16" else {TensorProto.FLOAT}
        assert {dtype_by_name[node.input[1]] for node in codes} == half
        assert answer["types"]["INT4"] == len(codes)


SHAPES = {"x": ((1, WIDE), (8, WIDE), (16, WIDE))}


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


@pytest.mark.parametrize(("half", "size"), [(True, 64), (False, 128)])
def test_engine_stores_weights_in_4_bits(half: bool, size: int, tmp_path: Path) -> None:
    tensorrt_rig.rig_environment()
    torch.manual_seed(0)
    options = {"group_size": size, "symmetric": "positive", "accuracy_level": 0}
    linear_layers = [nn.Linear(WIDE, WIDE) for _ in range(3)]
    codes = [quantize_module(layer, "int4", options) for layer in linear_layers]
    graphs = {write(tmp_path / "float.onnx", linear_layers, half): SHAPES}
    graphs[write(tmp_path / "int4.onnx", codes, half)] = SHAPES
    float_engine, int4_engine = tensorrt_rig.build_all(graphs)
    assert float_engine["types"].get("INT4", 0) == 0
    assert int4_engine["types"]["INT4"] == 3
    floats, weights = (2 if half else 4), 3 * WIDE * WIDE
    assert float_engine["bytes"] > floats * weights
    # half a byte, and a scale in the type of the product
    expected = weights * (0.5 + floats / size)
    assert expected < int4_engine["bytes"] < 1.15 * expected + 100_000, (float_engine, int4_engine, expected)


@pytest.mark.parametrize(("scheme", "options", "settings", "code", "values"), [
    ("int4", {"accuracy_level": 4}, {}, "unsupported-scheme-options", ["`accuracy_level: 0`"]),
    ("int4", {"symmetric": False}, {}, "unsupported-scheme-options", ["`symmetric: positive`"]),
    ("int4", {"group_size": 16}, {}, "unsupported-scheme-options",
     ["`group_size: 64 or 128`", "'group_size': 16"]),
    ("int4", {}, {"dtype": "bf16"}, "unsupported-dtype", [" bf16 ", " int4 ", " fp32 or fp16;"]),
    ("int8-static", {"activations_symmetric": True}, {"dtype": "bf16"}, "unsupported-dtype",
     [" bf16 ", " int8-static ", " fp32 or fp16;"]),
    ("int8-static", {}, {}, "unsupported-scheme-options", ["`activations_symmetric: true`"]),
    ("int3", {}, {}, "unsupported-scheme", [" int3: ", " int8-static or fp8 or nvfp4 or int4."]),
    ("int2", {}, {}, "unsupported-scheme",
     [" int2: ", "target: ort-cpu", " int8-static or fp8 or nvfp4 or int4."]),
    ("ternary", {}, {}, "unsupported-scheme", [" ternary: ", " int8-static or fp8 or nvfp4 or int4."]),
    ("binary", {}, {}, "unsupported-scheme", [" binary: ", " int8-static or fp8 or nvfp4 or int4."]),
    ("int8-groupwise", {}, {}, "unsupported-scheme",
     [" int8-groupwise: ", " int8-static or fp8 or nvfp4 or int4."]),
])  # fmt: skip
def test_unsupported_options_error_lists_supported_ones(
    scheme: str, options: dict[str, Any], settings: dict[str, Any], code: str, values: list[str]
) -> None:
    supported_options = {"symmetric": "positive", "accuracy_level": 0} if scheme == "int4" else {}
    layer = quantize_module(
        nn.Linear(64, 8), scheme, default_options(find_scheme(scheme)) | supported_options | options
    )
    with raises_code(code, InputError) as excinfo:
        tolerance_kind(nn.Sequential(layer), OnnxSettings.model_validate({"target": "tensorrt"} | settings))
    assert [value for value in values if value not in str(excinfo.value)] == []


def test_int4_in_ort_tensorrt_is_rejected_with_supported_schemes() -> None:
    layer = quantize_module(
        nn.Linear(64, 8),
        "int4",
        default_options(find_scheme("int4")) | {"symmetric": "positive", "accuracy_level": 0},
    )
    with raises_code("unsupported-scheme", InputError) as excinfo:
        tolerance_kind(nn.Sequential(layer), OnnxSettings(target="ort-tensorrt"))
    assert str(excinfo.value).endswith(" int8-static.")


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_weight_only_quantization_uses_float_tolerance(dtype: str) -> None:
    options = default_options(find_scheme("int4")) | {"symmetric": "positive", "accuracy_level": 0}
    layer = quantize_module(nn.Linear(64, 8), "int4", options)
    assert tolerance_kind(nn.Sequential(layer), OnnxSettings(target="tensorrt", dtype=dtype)) == dtype
