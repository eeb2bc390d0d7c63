"""Sentence embedders as graphs: one vector a text, from ids and mask alone, with padding as without."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.core.errors import ParityError
from smelt.data.splits import Columns
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings, TensorrtSettings
from smelt.export.tensorrt.preflight import load_graph, preflight
from smelt.export.tensorrt.profiles import profile_ranges
from smelt.export.tensorrt.stage import plan_graphs
from smelt.runtimes.predict_texts import embed_texts
from smelt.runtimes.registry import open_folder
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import embedders, tiny
from tests.support.pairs import matrix

FAMILIES = embedders.FAMILIES if matrix.is_full_matrix() else ("distilbert", "modernbert")
TEXTS = [*tiny.SENTENCES[:3], "she", " ".join(tiny.SENTENCES * 3)]


def export(folder, source, stage=Onnx, name="onnx", **settings):
    split = read_split(str(embedders.write_rows(folder / "rows.jsonl")), embedders.TASK, Columns(), folder)
    ctx = harness.make_context(folder / name, embedders.TASK, {"train": split})
    stage_settings = OnnxSettings(**settings) if stage is Onnx else QuantizeSettings(**settings)
    stage()(tiny.as_artifact(source, embedders.TASK), stage_settings, ctx)
    return ctx


@pytest.mark.parametrize(
    ("family", "pooling"), [(n, "mean") for n in FAMILIES] + [("bert", "cls"), ("roberta", "max")]
)
def test_graph_equals_embedding_of_each_single_text(family, pooling, tmp_path):
    folder = embedders.write_embedder(tmp_path / "m", family, pooling=pooling)
    ctx = export(tmp_path, folder)
    session = onnxruntime.InferenceSession(ctx.out / "model.onnx")
    assert [i.name for i in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert [(o.name, o.shape) for o in session.get_outputs()] == [("sentence_embedding", ["batch", 32])]
    assert ctx.warnings == []  # onnxsim's result was taken too
    assert set(ctx.details["parity"]["model"]) >= {"largest", "mean", "exact"}
    assert "agreement" not in ctx.details["parity"]["model"]
    with open_folder(ctx.out, "onnx", "ort-cpu", 1) as runner:
        vectors = embed_texts(runner, TEXTS)
    assert np.abs(vectors - embedders.expected_vectors(folder, TEXTS, pooling)).max() < 2e-6


def test_graph_that_pools_padding_fails_parity(tmp_path, monkeypatch):
    from smelt.models import sentence_model

    original = sentence_model.pool_hidden_states
    folder = embedders.write_embedder(tmp_path / "m")

    def wrong(hidden, mask, rules):
        import torch

        tracing = torch.compiler.is_exporting()
        return original(hidden, torch.ones_like(mask) if tracing else mask, rules)

    monkeypatch.setattr(sentence_model, "pool_hidden_states", wrong)
    with raises_code("parity-failed", ParityError) as excinfo:
        export(tmp_path, folder)
    assert "sentence_embedding" in str(excinfo.value)


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int4"])
def test_quantized_embedder_is_exported_with_quantized_weights(scheme, tmp_path):
    folder = embedders.write_embedder(tmp_path / "m")
    quantized = export(tmp_path, folder, Quantize, "codes", scheme=scheme)
    ctx = export(tmp_path, quantized.out)
    assert ctx.details["parity"]["model"]["operators"] > 5
    with open_folder(ctx.out, "onnx", "ort-cpu", 1) as runner:
        vectors = embed_texts(runner, TEXTS)
    cosines = np.sum(vectors * embedders.expected_vectors(folder, TEXTS), axis=1)
    assert cosines.min() > 0.9


def test_half_precision_tensorrt_graph_passes_preflight(tmp_path):
    folder = embedders.write_embedder(tmp_path / "m")
    ctx = export(tmp_path, folder, target="tensorrt", dtype="fp16")
    path = ctx.out / "model.onnx"
    assert [p.text for p in preflight(load_graph(path), path) if p.severity == "error"] == []
    scalars = [numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer if not t.dims]
    [epsilon] = [v for v in scalars if v == np.float32(1e-12)]  # in float16 a zero vector would be 0 / 0
    assert epsilon.dtype == np.float32
    [ranges], limit = profile_ranges(ctx.out, TensorrtSettings(), ctx)
    assert ranges["input"].max <= 16  # the length of a text, not of a pair
    [[shapes]] = plan_graphs(ctx.out, [ranges], limit, []).values()
    assert set(shapes) == {"input_ids", "attention_mask"}
    with open_folder(ctx.out, "onnx", "tensorrt", 1) as runner:
        vectors = embed_texts(runner, TEXTS[:3])
    assert vectors.dtype == np.float32
    assert np.abs(vectors - embedders.expected_vectors(folder, TEXTS[:3])).max() < 5e-3
