"""The summary of an engine: of the parsed network on the rig, of the inspector's JSON in NVIDIA's formats."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from onnx import TensorProto, helper, save

from smelt.export.tensorrt.engine_summary import inspect_engine, summarize_layers
from tests.support.processes import tensorrt_rig


def layer(name: str, output: str, tactic: str = "") -> dict[str, Any]:
    return {
        "Name": name, "LayerType": "kgen", "TacticName": tactic,
        "Inputs": [{"Name": "x", "Dimensions": [1, 40, 256], "Format/Datatype": "Half"}],
        "Outputs": [{"Name": "y", "Dimensions": [1, 40, 256], "Format/Datatype": output}],
    }  # fmt: skip


# names, types and tactics as in github.com/NVIDIA/TensorRT/issues/4397 and in reports of `_gemm_mha_v2`
LAYERS = [
    layer("/pos_ff/output/MatMul_myl0_7", "Half", "sm80_xmma_gemm_f16f16_f16f16_f16_nn_n_tilesize32x32x64"),
    layer("__myl_AddCastMeanSubMulMeanAddSqrtDivMulCastMulAdd_myl0_8", "Half"),
    layer("_gemm_mha_v2_myl3_6", "Half", "_gemm_mha_v2_0x2a"),
    layer("_gemv_mha_v1_myl4_2", "BFloat16"),
    layer("/encoder/mha/attn/value/MatMul_myl0_9", "FP8"),
    layer("Reformatting CopyNode for Input Tensor 0", "Row major linear FP16 format"),
    layer("logits", "Float"),
]


@pytest.mark.quick
def test_kernels_are_counted_by_precision_and_attention_by_kernel_name() -> None:
    assert summarize_layers(json.dumps({"Layers": LAYERS, "I/O Tensors": []})) == {
        "layers": 7, "precisions": {"bf16": 1, "fp16": 4, "fp32": 1, "fp8": 1}, "fused_attention": 2,
    }  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("text", ['{"Layers": ["MatMul", "Add"]}', '{"Layers": [{"Name": "a"b"}]}', "", "{}"])
def test_names_without_details_have_no_summary(text: str) -> None:
    assert summarize_layers(text) is None


@pytest.mark.quick
def test_engine_that_cannot_be_opened_has_no_summary() -> None:
    text = json.dumps({"Layers": LAYERS})
    inspector = SimpleNamespace(get_engine_information=lambda layout: text if layout == "json" else "")
    engine = SimpleNamespace(create_engine_inspector=lambda: inspector)
    engines = {b"plan": engine, b"": None}
    trt = SimpleNamespace(
        Runtime=lambda logger: SimpleNamespace(deserialize_cuda_engine=engines.__getitem__),
        LayerInformationFormat=SimpleNamespace(JSON="json"),
    )
    summary = inspect_engine(trt, b"plan", None)
    assert summary is not None
    assert summary["layers"] == 7
    assert inspect_engine(trt, b"", None) is None


@pytest.mark.parametrize("fused", [True, False])
def test_network_reports_attention_operators_and_precisions(fused: bool, tmp_path: Path) -> None:
    tensorrt_rig.rig_environment()
    sizes = ["batch", 4, "length", 64]
    nodes = [helper.make_node("Attention", ["q", "k", "v"], ["y"], "attention", scale=0.125)]
    if not fused:
        nodes = [
            helper.make_node("Transpose", ["k"], ["t"], perm=[0, 1, 3, 2]),
            helper.make_node("MatMul", ["q", "t"], ["s"]), helper.make_node("Softmax", ["s"], ["p"]),
            helper.make_node("MatMul", ["p", "v"], ["y"]),
        ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(name, TensorProto.FLOAT16, sizes) for name in "qkv"],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, sizes)],
    )  # fmt: skip
    path = tmp_path / "model.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), path)
    answer = tensorrt_rig.build(path, dict.fromkeys("qkv", ((1, 4, 1, 64), (2, 4, 8, 64), (4, 4, 16, 64))))
    assert answer.get("bytes"), answer
    assert answer["network"]["fused_attention"] == fused
    assert answer["network"]["precisions"]["fp16"] > 0
