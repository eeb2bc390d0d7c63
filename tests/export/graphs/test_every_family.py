"""Graphs and the torch runner give the tokens and classes of transformers, family by family."""

import numpy as np
import pytest
import torch

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.export.graphs.export_graph import model_graphs
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.generation.config import GenerationSettings
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.models.families.registry import FAMILIES
from smelt.runtimes.predict_texts import generate_texts
from smelt.runtimes.registry import open_runner
from tests.support.expected_errors import raises_code
from tests.support.graphs import graph_exports
from tests.support.models import every_family, tiny
from tests.support.pairs import matrix

# of each kind one; the others go through all stages and the parity check in the matrix
SOME = ["albert", "gemma", "m2m_100", "modernbert", "opt", "phi3"]
TEXTS = tiny.SENTENCES[:5]


@pytest.fixture(
    scope="module", params=sorted(every_family.TEXT_FAMILIES) if matrix.is_full_matrix() else SOME
)
def family(request, tmp_path_factory):
    """A tiny model and its graphs as artifacts, and the family."""
    root_folder = tmp_path_factory.mktemp(request.param)
    task = FAMILIES[request.param].tasks[0]
    source = tiny.as_artifact(every_family.make_model(root_folder / "model", request.param), task)
    ctx = graph_exports.make_context(root_folder / "onnx", task)
    Onnx()(source, OnnxSettings(), ctx)
    manifest = source.manifest.model_copy(update={"format": "onnx", "details": ctx.details})
    return FAMILIES[request.param], source, Artifact(ctx.out, manifest)


def test_runners_equal_transformers_outputs(family):
    family_info, source, graphs = family
    model, _ = load_model(source.path)
    tokenizer = load_tokenizer(source.path)
    if family_info.architecture == "encoder":
        _same_classes(model, tokenizer, source, graphs)
        return
    expected = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=8, do_sample=False, num_beams=1)
        expected.append(out[0].tolist())
    for artifact in (source, graphs):
        with open_runner(artifact, threads=1) as runner:
            generated = generate_texts(
                runner, TEXTS, GenerationSettings(max_new_tokens=8, num_beams=1), batch_size=2
            )
        assert generated == [tokenizer.decode(row, skip_special_tokens=True) for row in expected]
    assert len(set(generated)) > 1  # or the model says the same of everything


def _same_classes(model, tokenizer, source, graphs):
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = model(batch.input_ids, attention_mask=batch.attention_mask).logits.numpy()
    from smelt.data.splits import Example
    from smelt.runtimes.predict_texts import class_logits

    for artifact in (source, graphs):
        with open_runner(artifact, threads=1) as runner:
            logits = class_logits(runner, [Example(text) for text in TEXTS], batch_size=2)
        np.testing.assert_allclose(logits, expected, atol=2e-5)
    assert np.ptp(expected, axis=0).max() > 0.01


@pytest.mark.quick
def test_unsupported_config_is_rejected_before_tracing(tmp_path):
    model, _ = load_model(every_family.write_model(tmp_path / "model", "modernbert"))
    model.config.rope_parameters["full_attention"]["rope_type"] = "dynamic"
    with raises_code("unsupported-config", InputError) as excinfo:
        model_graphs(model)
    assert "'dynamic'" in str(excinfo.value)


def test_scaled_positions_of_encoder_are_in_graph(tmp_path):
    rope = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 17}}
    source = tiny.as_artifact(
        every_family.write_model(tmp_path / "model", "modernbert", **rope), "text-classification"
    )
    ctx = graph_exports.make_context(tmp_path / "onnx", "text-classification")
    Onnx()(source, OnnxSettings(), ctx)
    model, _ = load_model(source.path)
    assert model.model.rotary_emb.full_attention_attention_scaling != 1
    graphs = Artifact(ctx.out, source.manifest.model_copy(update={"format": "onnx", "details": ctx.details}))
    _same_classes(model, load_tokenizer(source.path), source, graphs)


WINDOWS = {
    "mistral": {"sliding_window": 4},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "modernbert": {"local_attention": 4},
}


@pytest.mark.parametrize(
    ("name", "target"),
    matrix.matrix_cells(
        list(WINDOWS) if matrix.is_full_matrix() else ["mistral", "modernbert"], ["ort-cpu", "tensorrt"]
    ),
)
def test_parity_check_detects_window_off_by_one(name, target, tmp_path, monkeypatch):
    from dataclasses import replace

    from smelt.core.errors import RunError

    task = FAMILIES[name].tasks[0]
    source = tiny.as_artifact(every_family.write_model(tmp_path / "model", name, **WINDOWS[name]), task)
    Onnx()(source, OnnxSettings(target=target), graph_exports.make_context(tmp_path / "right", task))
    right = FAMILIES[name].window
    wrong = replace(FAMILIES[name], window=lambda c, n: None if right(c, n) is None else right(c, n) + 1)
    monkeypatch.setitem(FAMILIES, name, wrong)
    with raises_code("parity-failed", RunError):
        Onnx()(source, OnnxSettings(target=target), graph_exports.make_context(tmp_path / "wrong", task))
