"""DeBERTa's graphs: distances in logarithmic buckets, at every length of a text and after other stages."""

from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from smelt.compress.prune.settings import PruneSettings
from smelt.compress.prune.stage import Prune
from smelt.compress.quantize.stage import Quantize, QuantizeSettings
from smelt.core.errors import InputError, RunError
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.models.checkpoint import load_model
from smelt.models.families import deberta_v2
from smelt.models.families.registry import FAMILIES
from tests.support.expected_errors import raises_code
from tests.support.graphs import graph_exports
from tests.support.models import every_family, questions, taggers, tiny

NAME = "deberta-v2"
MAKERS = {
    "text-classification": partial(every_family.make_model, family=NAME),
    "token-classification": partial(taggers.write_model, family=NAME),
    "question-answering": partial(questions.write_model, family=NAME),
}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("buckets", "farthest"), [(256, -1), (256, 512), (8, 40), (8, 5), (32, 24), (-1, 12), (-1, -1)]
)
def test_distance_rows_equal_transformers_relative_positions(buckets, farthest):
    """Lengths below half of the buckets, between it and the farthest distance, and beyond."""
    limit = 512 if buckets == 256 else 40
    config = {
        "position_buckets": buckets, "max_relative_positions": farthest, "max_position_embeddings": limit,
    }  # fmt: skip
    rows = deberta_v2.distance_rows(config)
    farthest = farthest if farthest > 0 else limit
    span = buckets if buckets > 0 else farthest
    for length in (1, span // 2, span + 1, limit, farthest + 9):
        states = torch.zeros(1, length, 1)
        positions = build_relative_position(states, states, buckets, farthest)[0]
        expected = (positions + span).clamp(0, 2 * span - 1)
        distances = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        assert rows[distances.clamp(-farthest, farthest) + farthest].equal(expected)
    assert rows.unique().numel() > span


def exported(folder, make, task, scheme=None):
    """Return the model with random biases and norms, and its graph."""
    source = make(folder / "model")
    graph_exports.randomize_biases(source)
    if scheme:
        quantize_settings = QuantizeSettings(scheme=scheme)
        ctx = graph_exports.make_context(folder / "quantized", task)
        Quantize()(tiny.as_artifact(source, task), quantize_settings, ctx)
        source = ctx.out
    ctx = graph_exports.make_context(folder / "onnx", task)
    Onnx()(tiny.as_artifact(source, task), OnnxSettings(), ctx)
    return load_model(source)[0], ctx.out / "model.onnx"


def assert_graph_equals_model(model, path, largest=2e-5):
    """Compare real tokens of texts within the buckets, beyond them, and beyond all distances of the table."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    draw = torch.Generator().manual_seed(0)
    for length in (1, 2, 4, 5, 9, 34, 35, 70):
        ids = torch.randint(5, model.config.vocab_size, (3, length), generator=draw)
        mask = torch.ones_like(ids)
        mask[1, length // 2 + 1 :] = 0
        with torch.no_grad():
            output = model(ids, attention_mask=mask)
        expected = output.logits if "logits" in output else torch.stack([*output.values()][-2:], -1)
        [logits] = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        real = mask.bool() if logits.ndim == 3 else slice(None)
        np.testing.assert_allclose(logits[real], expected[real].numpy(), atol=largest)
        assert np.ptp(logits[real], axis=0).max() > 0.01 or length < 4


@pytest.mark.parametrize("task", MAKERS)
def test_graph_equals_transformers_at_every_length(task, tmp_path):
    assert_graph_equals_model(*exported(tmp_path, MAKERS[task], task))


def test_graph_equals_model_without_buckets(tmp_path):
    make = partial(MAKERS["text-classification"], position_buckets=-1, max_relative_positions=6)
    assert_graph_equals_model(*exported(tmp_path, make, "text-classification"))


@pytest.mark.parametrize("scheme", [None, "int8-dynamic"])
def test_graph_holds_projected_distances(scheme, tmp_path):
    """No product of constants is left: runtimes would compute a quantized one at each call."""
    make = partial(MAKERS["text-classification"], position_buckets=256, hidden_size=128)
    _, path = exported(tmp_path, make, "text-classification", scheme)
    assert constant_products(onnx.load(path).graph) == []


def constant_products(graph):
    """Return the matrix products that have no input but constants."""
    constants, products = {tensor.name for tensor in graph.initializer}, []
    for node in graph.node:
        if constants.issuperset(filter(None, node.input)):
            constants.update(node.output)
            if "MatMul" in node.op_type or node.op_type == "Gemm":  # of every domain
                products.append(node.name)
    return products


def test_parity_detects_wrong_row_of_distance(tmp_path, monkeypatch):
    source = tiny.as_artifact(MAKERS["text-classification"](tmp_path / "model"), "text-classification")
    right = FAMILIES[NAME].distance_rows
    wrong = replace(FAMILIES[NAME], distance_rows=lambda config: right(config).roll(1))
    monkeypatch.setitem(FAMILIES, NAME, wrong)
    with raises_code("parity-failed", RunError):
        Onnx()(source, OnnxSettings(), graph_exports.make_context(tmp_path / "onnx", "text-classification"))


def test_pruned_heads_and_width_equal_their_graph(tmp_path):
    """Heads own rows of the projections of distances too; a channel also is one of their embeddings."""
    source = MAKERS["text-classification"](tmp_path / "model")
    for number, targets in enumerate((["heads", "ffn"], ["width"])):
        settings = PruneSettings(targets=targets, keep_ratio=0.5, importance="magnitude", multiple_of=8)
        every_family.run_stage(Prune(), settings, source, NAME, tmp_path / f"pruned-{number}")
        source = tmp_path / f"pruned-{number}"
    model, _ = load_model(source)
    table = model.deberta.encoder.rel_embeddings.weight
    assert table.shape == (16, 16)
    assert model.deberta.encoder.layer[0].attention.self.key_proj.weight.shape == (16, 16)
    ctx = graph_exports.make_context(tmp_path / "onnx", "text-classification")
    Onnx()(tiny.as_artifact(source, "text-classification"), OnnxSettings(), ctx)
    assert_graph_equals_model(model, ctx.out / "model.onnx")


@pytest.mark.quick
@pytest.mark.parametrize(
    "changes",
    [
        {"relative_attention": False}, {"share_att_key": False}, {"position_biased_input": True},
        {"norm_rel_ebd": "none"}, {"type_vocab_size": 2}, {"conv_kernel_size": 3}, {"pos_att_type": "c2p"},
        {"pooler_hidden_size": 16},
    ],
)  # fmt: skip
def test_unsupported_attention_settings_are_rejected(changes, tmp_path):
    family = FAMILIES[NAME]
    config = {**family.layout_config, "hidden_size": 32, "pos_att_type": "p2c|c2p", "pooler_hidden_size": 32}
    assert family.unsupported_config(config) == []
    assert len(family.unsupported_config(config | changes)) == 1


def test_export_refuses_unsupported_config(tmp_path):
    from smelt.export.graphs.export_graph import model_graphs

    model, _ = load_model(MAKERS["text-classification"](tmp_path / "model"))
    model.config.pos_att_type = ["c2p"]
    with raises_code("unsupported-config", InputError):
        model_graphs(model)
