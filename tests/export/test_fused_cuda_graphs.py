"""Graphs for ort-cuda have ONNX's fused operators, and norms in float16 without Casts around them."""

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch.nn import functional as F

from smelt.export import half_graphs
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.runtimes.onnx_session import open_onnx_session
from tests.support.graphs import cuda_graphs, graph_exports
from tests.support.models import tiny
from tests.support.processes import cuda_rig, cuda_steps

# one attention operator for each layer, with cross-attention for two
ATTENTIONS = {"bert": 2, "marian": 4, "vit": 2, "llama": 1, "gpt2": 2, "t5": 4}
GRAPHS = {"marian": "decoder_with_past_model", "t5": "decoder_with_past_model"}
# nodes more than the graph for ort-cpu. ViT: Casts of its float32 input and output. T5: 4 for the heads of
# cross-attention, as ONNX's Attention takes no queries of 3 axes with keys of 4; 2 for mask and output; 1 for
# the factor of the logits
MORE_NODES = {"vit": 2, "t5": 7}


@pytest.mark.parametrize("family", ATTENTIONS)
def test_fp16_graph_has_no_more_nodes_than_the_cpu_graph_on_the_same_provider(family):
    cuda_rig.rig_environment()
    name = f"{GRAPHS.get(family, 'model')}.onnx"
    cpu_folder = graph_exports.exported_graphs(family, "fp32", "ort-cpu").folder
    paths = [cuda_graphs.cuda_graphs(family)["fp16"] / name, cpu_folder / name]
    fused, other = cuda_rig.open_graphs(paths)
    assert fused.nodes <= other.nodes + MORE_NODES.get(family, 0)
    assert fused.operators["Attention"] == ATTENTIONS[family]
    assert fused.operators.get("Cast", 0) <= 2  # of the output, and of pixels
    assert not {"Softmax", "BiasSoftmax", "Pow"} & {*fused.operators}


@pytest.mark.parametrize("operator", ["LayerNormalization", "RMSNormalization"])
def test_norm_with_float16_inputs_is_near_float64_up_to_its_limit(operator, tmp_path):
    """The largest input that half precision is kept at; the CPU's kernels compute in float32 too."""
    width, largest = 64, half_graphs._NORM_SAFE_MAX
    torch.manual_seed(0)
    rows = torch.randn(16, width)
    rows = (rows * largest / rows.abs().max()).half()
    weight = torch.randn(width).half()
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, [16, width]) for name in "xy")
    node = helper.make_node(operator, ["x", "w"], ["y"], axis=-1, epsilon=1e-6)
    weights = onnx.numpy_helper.from_array(weight.numpy(), "w")
    graph = helper.make_graph([node], "norm", [x], [y], [weights])
    path = tmp_path / "norm.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), path)
    [result] = open_onnx_session(path).run(None, {"x": rows.numpy()})
    norm = F.layer_norm if operator == "LayerNormalization" else F.rms_norm
    expected = norm(rows.double(), (width,), weight.double(), eps=1e-6)
    assert float((torch.from_numpy(result).double() - expected).abs().max()) < 0.002
    assert float(rows.abs().max()) == largest


def test_norm_of_larger_inputs_remains_float32(monkeypatch, tmp_path):
    make, task = graph_exports.FAMILIES["bert"]
    monkeypatch.setattr(half_graphs, "_NORM_SAFE_MAX", 0.0)
    ctx = graph_exports.make_context(tmp_path / "onnx", task)
    source = tiny.as_artifact(make(tmp_path / "model"), task)
    Onnx()(source, OnnxSettings(target="ort-cuda", dtype="fp16"), ctx)
    model = onnx.load(ctx.out / "model.onnx")
    casts = {name for node in model.graph.node if node.op_type == "Cast" for name in node.output}
    norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    assert norms
    assert all(node.input[0] in casts for node in norms)


def test_older_opset_keeps_elementary_operators(tmp_path):
    make, task = graph_exports.FAMILIES["bert"]
    ctx = graph_exports.make_context(tmp_path / "onnx", task)
    source = tiny.as_artifact(make(tmp_path / "model"), task)
    Onnx()(source, OnnxSettings(target="ort-cuda", opset=17), ctx)
    assert ctx.details["opset"] == 17
    operators = {node.op_type for node in onnx.load(ctx.out / "model.onnx").graph.node}
    assert "Softmax" in operators
    assert "Attention" not in operators


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_provider_accepts_the_shapes_of_attention_with_caches(dtype):
    """Its kernels check shapes when they run: a mask without the axis of queries is refused then."""
    cuda_rig.rig_environment()
    folder = cuda_graphs.cuda_graphs("marian")[dtype]
    answer = cuda_rig.run_in_rig({"folder": str(folder)}, cuda_steps.__name__)
    assert answer["logits"] == cuda_steps.ROWS * vocabulary_size(folder) * 4


def vocabulary_size(folder):
    model = onnx.load(folder / "decoder_with_past_model.onnx", load_external_data=False)
    [logits] = [value for value in model.graph.output if value.name == "logits"]
    return logits.type.tensor_type.shape.dim[1].dim_value
