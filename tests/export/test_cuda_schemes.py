"""Quantized layers for ort-cuda: the CUDA provider has their operators, in fp32 and fp16."""

import onnx
import pytest

from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.quantization.schemes.registry import SCHEMES, supported_dtypes, supported_targets
from tests.support.graphs import graph_exports
from tests.support.models import causal, tiny
from tests.support.pairs import matrix
from tests.support.processes import cuda_rig

SUPPORTED = [name for name, scheme in SCHEMES.items() if "ort-cuda" in supported_targets([scheme])]
BITS = {"int8-groupwise": 8, "int4": 4, "int3": 4, "int2": 4, "ternary": 4, "binary": 4}
TASK = "language-modeling"
_BIAS = 6  # inputs of a MatMulNBits with a bias


def export(scheme, dtype, tmp_path):
    """Quantize and export a Qwen2 of one layer, which has biases; return its file and context."""
    source = causal.write_model(tmp_path / "model", "qwen2", num_hidden_layers=1)
    # the scheme of embeddings that goes with binary weights is refused
    tables = {"embedding_scheme": scheme} if SCHEMES[scheme].embedding_scheme else {}
    only = {name: values[0] for name, values in SCHEMES[scheme].required_options.get("ort-cuda", {}).items()}
    quantized = graph_exports.make_context(tmp_path / "quantized", TASK)
    Quantize()(tiny.as_artifact(source, TASK), QuantizeSettings(scheme=scheme, **only, **tables), quantized)
    ctx = graph_exports.make_context(tmp_path / "onnx", TASK)
    Onnx()(tiny.as_artifact(quantized.out, TASK), OnnxSettings(target="ort-cuda", dtype=dtype), ctx)
    return ctx.out / "model.onnx", ctx


@pytest.mark.quick
def test_schemes_of_matmul_nbits_and_matmul_bnb4_run_on_cuda():
    assert set(SUPPORTED) == {*BITS, "kmeans4", "pow2", "mxfp4", "bnb-nf4"}
    assert supported_dtypes([SCHEMES["int4"]], "ort-cuda") == ["fp32", "fp16"]
    assert supported_dtypes([SCHEMES["mxfp4"]], "ort-cuda") == ["fp32"]  # float16 lacks the least scales
    unsupported = {name for name in SCHEMES if name not in SUPPORTED}
    assert unsupported == {"int8-dynamic", "int8-static", "fp8", "nvfp4", "bnb-int8", "additive"}


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        cell
        for cell in matrix.matrix_cells(SUPPORTED, ["fp32", "fp16"], full=lambda s: s in ("int4", "bnb-nf4"))
        if cell[1] in supported_dtypes([SCHEMES[cell[0]]], "ort-cuda")
    ],
)
def test_provider_multiplies_quantized_weights_and_parity_holds(scheme, dtype, tmp_path):
    path, ctx = export(scheme, dtype, tmp_path)
    operator = SCHEMES[scheme].operators[0]
    [opened] = cuda_rig.open_graphs([path])
    assert opened.error is None
    nodes = [node for node in onnx.load(path).graph.node if node.op_type == operator]
    assert opened.operators[operator] == len(nodes) > 0
    assert all(len(node.input) < _BIAS for node in nodes)  # some of its kernels on CUDA add no bias
    assert operator not in opened.on_cpu
    assert ctx.details["parity"]


@pytest.mark.parametrize("kind", [onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16])
def test_provider_turns_blocked_int4_into_matmul_nbits(kind, tmp_path):
    """The form of smelt's graphs for TensorRT and OpenVINO, and of quantize-onnx with `quant_format: qdq`."""
    width, block = 64, 32
    x, y = (onnx.helper.make_tensor_value_info(name, kind, [1, width]) for name in "xy")
    nodes = [
        onnx.helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=0, block_size=block),
        onnx.helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    codes = onnx.helper.make_tensor(
        "w", onnx.TensorProto.INT4, [width, width], bytes(width * width // 2), raw=True
    )
    scales = onnx.helper.make_tensor("s", kind, [width // block, width], [1.0] * (width * width // block))
    graph = onnx.helper.make_graph(nodes, "blocked", [x], [y], [codes, scales])
    opsets = [onnx.helper.make_opsetid("", 21)]
    path = tmp_path / "blocked.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    [opened] = cuda_rig.open_graphs([path])
    assert (opened.error, opened.operators, opened.host_copies) == (None, {"MatMulNBits": 1}, 0)
