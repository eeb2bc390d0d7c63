"""Models whose FFN overflows in float16 leave as graphs that agree with float32, and say what they kept."""

import numpy as np
import onnx
import pytest
import torch
from pydantic import ValidationError

from smelt.core.errors import ParityError
from smelt.core.messages import message_codes
from smelt.export import half_graphs
from smelt.export import half_graphs as select_fp32
from smelt.export.half_graphs import Fp32Selection
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.export.tensorrt.preflight import preflight
from smelt.models.checkpoint import load_model, save_model
from tests.support.expected_errors import raises_code
from tests.support.graphs import graph_exports
from tests.support.models import embedders, every_family, images, tiny
from tests.support.pairs import matrix

# the product that is made too large, its graph, and the factor: its weights are still below 65,504
PLANTED = {
    "t5": ("encoder.block.0.layer.1.DenseReluDense.wo", "encoder_model", 2e4),
    "marian": ("model.decoder.layers.0.fc2", "decoder_with_past_model", 2e4),
    "bert": ("bert.encoder.layer.0.output.dense", "model", 6e4),
    "llama": ("model.layers.0.mlp.down_proj", "model", 2e4),
}
LAYERS = {
    "t5": {"num_layers": 1, "num_decoder_layers": 1}, "marian": graph_exports.ONE_LAYER_PER_STACK,
    "bert": graph_exports.ONE_LAYER, "llama": {},
}  # fmt: skip


def plant(family, folder):
    """Return a model of the family, one of whose products gives what float16 cannot hold; its task."""
    make_source, task = graph_exports.FAMILIES[family]
    source = make_source(folder / "model", **LAYERS[family])
    graph_exports.randomize_biases(source)
    model, edits = load_model(source)
    with torch.no_grad():
        product, _, factor = PLANTED[family]
        model.get_submodule(product).weight.mul_(factor)
    (folder / "planted").mkdir()
    save_model(model, edits, folder / "planted", source)
    return folder / "planted", task


def export(family, folder, **settings):
    source, task = plant(family, folder)
    ctx = graph_exports.make_context(folder / "onnx", task)
    Onnx()(tiny.as_artifact(source, task), OnnxSettings(generation_graph=False, **settings), ctx)
    return ctx


@pytest.mark.parametrize("family", PLANTED if matrix.is_full_matrix() else ["marian"])
def test_overflowing_blocks_are_kept_float32_and_named(family, tmp_path):
    ctx = export(family, tmp_path, target="tensorrt", dtype="fp16")
    block, graph, _ = PLANTED[family]
    block_values = ctx.details["float32"][graph]["blocks"]
    name = next(n for n in block_values if block.endswith(n) or n.endswith(block))
    assert block_values[name] > select_fp32.FP16_SAFE_MAX
    (warning,) = [entry for entry in ctx.warnings if entry.code == "kept-float32"]
    assert f"{name} (" in warning.message
    assert all(entry["mean"] < 0.01 for entry in ctx.details["parity"].values())
    for path in ctx.out.glob("*.onnx"):
        model = onnx.load(path)
        assert [p for p in preflight(model, path) if p.severity == "error"] == []
        matrix_types = {t.data_type for t in model.graph.initializer if len(t.dims) == 2}
        assert onnx.TensorProto.FLOAT16 in matrix_types  # what does not overflow became half
        assert (onnx.TensorProto.FLOAT in matrix_types) >= (path.stem == graph)


@pytest.mark.parametrize("family", ["t5", "llama"] if matrix.is_full_matrix() else ["llama"])
def test_overflowing_float16_graph_fails_parity(family, tmp_path, monkeypatch):
    monkeypatch.setattr(select_fp32, "FP16_SAFE_MAX", float("inf"))
    monkeypatch.setattr(select_fp32, "FP16_MAX", float("inf"))
    with raises_code("non-finite-outputs", ParityError):
        export(family, tmp_path, target="ort-cuda", dtype="fp16")


@pytest.mark.parametrize(
    ("family", "target"),
    [("t5", "tensorrt"), *([("llama", "ort-cuda")] if matrix.is_full_matrix() else [])],
)
def test_bf16_keeps_only_norms_in_float32(family, target, tmp_path):
    ctx = export(family, tmp_path, target=target, dtype="bf16")
    assert all(entry["blocks"] == {} and entry["norms"] > 2 for entry in ctx.details["float32"].values())
    assert [w for w in ctx.warnings if "float32" in w] == []
    assert all(entry["mean"] < 0.1 for entry in ctx.details["parity"].values())
    for path in ctx.out.glob("*.onnx"):
        model = onnx.load(path)
        assert [p for p in preflight(model, path) if p.severity == "error"] == []
        value_infos = onnx.shape_inference.infer_shapes(model).graph.value_info
        types = {value.name: value.type.tensor_type.elem_type for value in value_infos}
        mean_outputs = [node.output[0] for node in model.graph.node if node.op_type == "ReduceMean"]
        assert {types[name] for name in mean_outputs} == {onnx.TensorProto.FLOAT}
        caches = {
            i.type.tensor_type.elem_type for i in model.graph.input if i.name.startswith("past_key_values")
        }
        assert caches <= {onnx.TensorProto.BFLOAT16 if target == "tensorrt" else onnx.TensorProto.FLOAT}


@pytest.mark.parametrize("family", ["resnet", "modernbert", "embedder"])
def test_bf16_graphs_have_no_operator_missing_on_cuda(family, tmp_path):
    """Conv, Sin and Cos take bfloat16 from opset 22 on, as ONNX's own checker says."""
    if family == "resnet":
        source, task = images.write_model(tmp_path / "m", family), images.TASK
    elif family == "embedder":
        source, task = embedders.write_embedder(tmp_path / "m"), "sentence-similarity"
    else:
        source, task = every_family.model_with_layers(family, 2), "text-classification"
    settings = OnnxSettings(target="ort-cuda", dtype="bf16")
    ctx = graph_exports.harness.make_context(tmp_path / "out", task, {})
    Onnx()(tiny.as_artifact(source, task), settings, ctx)
    assert ctx.details["opset"] >= 22
    for path in ctx.out.glob("*.onnx"):
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.shape_inference.infer_shapes(onnx.load(path))
        types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
        unsupported_nodes = [n for n in model.graph.node if n.op_type in ("ReduceL2", "Clip", "Log")]
        assert {types[n.output[0]] for n in unsupported_nodes} <= {onnx.TensorProto.FLOAT}
        assert unsupported_nodes or family != "embedder"


@pytest.mark.parametrize("settings", [{"target": "ort-cpu"}, {"target": "ort-cuda", "dtype": "fp16"}])
def test_tf32_requires_float32_on_cuda(settings):
    with pytest.raises(ValidationError):
        OnnxSettings(tf32=True, **settings)
    assert OnnxSettings(target="ort-cuda", tf32=True).tf32


def test_missing_data_uses_random_ids_with_warning(tmp_path):
    source, task = plant("bert", tmp_path)
    ctx = graph_exports.harness.make_context(tmp_path / "onnx", task, {})
    Onnx()(tiny.as_artifact(source, task), OnnxSettings(target="tensorrt", dtype="fp16"), ctx)
    assert ctx.details["float32"]["model"]["blocks"]
    assert "made-up-inputs" in message_codes(ctx.warnings)


def test_warning_lists_largest_blocks_first_and_counts_others():
    assert half_graphs.overflow_warning({"model": Fp32Selection(norms={"norm"})}) is None
    single_warning = half_graphs.overflow_warning({"model": Fp32Selection(blocks={"a": 40000.4})})
    assert single_warning.endswith(" 32,752): a (40,000).")
    many_blocks = Fp32Selection(blocks={f"b{i}": 1e5 + i for i in range(7)})
    warning_text = half_graphs.overflow_warning(
        {"encoder_model": many_blocks, "decoder": Fp32Selection(blocks={"b0": 2e5})}
    )
    assert warning_text.endswith(
        "b0 (200,000), b6 (100,006), b5 (100,005), b4 (100,004), b3 (100,003) and 2 more."
    )


def test_overflowing_caches_are_kept_float32_in_both_graphs(tmp_path):
    """Values of a translator's cross-attention, which one graph gives and the other one reads."""
    make_source, task = graph_exports.FAMILIES["marian"]
    source = make_source(tmp_path / "model", **LAYERS["marian"])
    model, edits = load_model(source)
    with torch.no_grad():
        model.model.decoder.layers[0].encoder_attn.v_proj.weight.mul_(1e6)
    (tmp_path / "planted").mkdir()
    save_model(model, edits, tmp_path / "planted", source)
    ctx = graph_exports.make_context(tmp_path / "onnx", task)
    Onnx()(tiny.as_artifact(tmp_path / "planted", task), OnnxSettings(target="ort-cuda", dtype="fp16"), ctx)
    encoder, decoder = (
        onnx.load(ctx.out / f"{name}.onnx").graph for name in ("encoder_model", "decoder_with_past_model")
    )
    dtypes = {value.name: value.type.tensor_type.elem_type for value in (*encoder.output, *decoder.input)}
    float_caches = {name for name, kind in dtypes.items() if kind == onnx.TensorProto.FLOAT}
    assert float_caches == {"present.0.encoder.value", "past_key_values.0.encoder.value"}
    assert np.isfinite(ctx.details["parity"]["decoder_with_past_model"]["largest"])
