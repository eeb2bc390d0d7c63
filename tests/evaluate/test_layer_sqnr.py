"""SQNR of layers, against PyTorch's compute_sqnr on hidden states that transformers returns."""

import copy

import pytest
import torch
from torch.ao.ns.fx.utils import compute_sqnr

from smelt.compress.drop_layers.stage import DropLayers, DropLayersSettings
from smelt.compress.prune.settings import PruneSettings
from smelt.compress.prune.stage import Prune
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.core.artifact import Artifact
from smelt.data.splits import Example, Split
from smelt.evaluate import layer_sqnr
from smelt.evaluate.layer_sqnr import (
    LOWEST_DB,
    LayerComparison,
    NotComparableError,
    SampleSource,
    block_sqnr,
    output_sqnr,
)
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import blocks_of
from smelt.pipeline.execute.baseline_comparisons import kept_blocks
from tests.support import harness
from tests.support.models import every_family, tiny

BATCHES = [
    {
        "input_ids": torch.arange(5, 15).reshape(rows, -1),
        "attention_mask": torch.ones(rows, 10 // rows).long(),
    }
    for rows in (1, 2)
]


def batches_of(model):
    """The source is also the target, where there is one."""
    extra_inputs = ["decoder_input_ids"] if model.config.is_encoder_decoder else []
    return [(batch, batch) for batch in [b | dict.fromkeys(extra_inputs, b["input_ids"]) for b in BATCHES]]


def loaded(family, layers=3):
    model, _ = load_model(every_family.model_with_layers(family, layers))
    return model, copy.deepcopy(model)


@torch.no_grad()
def ruin(layer, scale=1.0):
    noise = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1))
    layer.weight += scale * layer.weight.std() * noise


def changed(entries):
    """The ratios by layer, without those of rounding errors."""
    changed_entries = [entry for entry in entries if entry["sqnr_db"] is not None and entry["sqnr_db"] < 100]
    return {(entry["name"], entry["part"]): entry["sqnr_db"] for entry in changed_entries}


@torch.no_grad()
def test_ratios_equal_pytorch_on_hidden_states_of_the_baseline():
    model, step = loaded("bert")
    first, last = step.bert.encoder.layer[0], step.bert.encoder.layer[2]
    ruin(first.intermediate.dense, 0.3)
    ruin(last.attention.output.dense, 0.1)
    ruin(step.classifier, 0.2)
    sqnr_by_block = changed(block_sqnr(model, step, batches_of(model), {}))
    pairs, parts, outputs, heads = {0: [], 2: []}, [], [], []
    for batch in BATCHES:
        base = model(**batch, output_hidden_states=True)
        for block_index, layer in ((0, first), (2, last)):
            pairs[block_index].append(
                (base.hidden_states[block_index + 1], layer(base.hidden_states[block_index]))
            )
        dense = [bert_model.bert.encoder.layer[2].attention for bert_model in (model, step)]
        attention_outputs = [bert_model.self(base.hidden_states[2])[0] for bert_model in dense]
        parts.append(
            [bert_model.output.dense(x) for bert_model, x in zip(dense, attention_outputs, strict=True)]
        )
        outputs.append((base.logits, step(**batch).logits))
        pooled = model.bert.pooler(base.hidden_states[-1])
        heads.append((base.logits, step.classifier(pooled)))

    def ratio(pairs):
        return float(
            compute_sqnr(*(torch.cat([side.flatten() for side in s]) for s in zip(*pairs, strict=True)))
        )

    name = "bert.encoder.layer"
    assert sqnr_by_block[f"{name}.0", "block"] == pytest.approx(ratio(pairs[0]), abs=0.01)
    assert sqnr_by_block[f"{name}.2", "block"] == pytest.approx(ratio(pairs[2]), abs=0.01)
    assert sqnr_by_block[f"{name}.2", "self-attention"] == pytest.approx(ratio(parts), abs=0.01)
    assert sqnr_by_block["classifier", "output"] == pytest.approx(ratio(heads), abs=0.01)
    assert (f"{name}.1", "block") not in sqnr_by_block  # its inputs are the baseline's
    assert output_sqnr(model, step, batches_of(model)) == pytest.approx(ratio(outputs), abs=0.01)
    assert output_sqnr(model, model, batches_of(model)) is None


@pytest.mark.parametrize("family", ["marian", "t5", "opt", "gemma"])
def test_corrupted_layer_is_named(family):
    """In the first block, so that an error that reached the next ones would show there."""
    model, step = loaded(family)
    last = blocks_of(step)[-1]
    block = blocks_of(step)[last.index and -1 - last.index]  # the first one of the last stack
    ruin(step.get_submodule(block.feed_forward.down))
    sqnr_by_block = changed(block_sqnr(model, step, batches_of(model), {}))
    assert set(sqnr_by_block) == {(block.module_path, "block"), (block.module_path, "feed-forward")}
    ruin(step.get_submodule(block.feed_forward.down), float("nan"))
    assert changed(block_sqnr(model, step, batches_of(model), {}))[block.module_path, "block"] == LOWEST_DB


@torch.no_grad()
def test_removed_block_is_compared_with_its_input():
    model, step = loaded("gpt2")
    del step.transformer.h[1]
    pairs = batches_of(model)
    entries = block_sqnr(model, step, pairs, {"layers": [0, 2]})
    assert [entry["name"] for entry in entries if entry["removed"]] == ["transformer.h.1"]
    states = [model(**batch, output_hidden_states=True).hidden_states[1:3] for batch in BATCHES]
    states_before, states_after = (
        torch.cat([s.flatten() for s in side]) for side in zip(*states, strict=True)
    )
    assert changed(entries) == {
        ("transformer.h.1", "block"): pytest.approx(
            float(compute_sqnr(states_after, states_before)), abs=0.01
        )
    }
    for kept_indices in ({}, {"layers": [0, 3]}):
        with pytest.raises(NotComparableError):
            block_sqnr(model, step, pairs, kept_indices)


def test_blocks_kept_by_several_steps_refer_to_the_baseline(tmp_path):
    details_by_step = {
        "drop": tiny.as_artifact(tmp_path, kept_layers={"encoder_layers": [0, 2, 3], "decoder_layers": [1]}),
        "tune": tiny.as_artifact(tmp_path),
        "student": tiny.as_artifact(tmp_path, kept_encoder_layers=[0, 2]),
    }
    parents = {"model": None, "drop": "model", "tune": "drop", "student": "tune", "other": "model"}
    kept_positions = kept_blocks("student", "model", parents, details_by_step)
    assert kept_positions == {"encoder_layers": [0, 3], "decoder_layers": [1]}
    assert kept_blocks("student", "drop", parents, details_by_step) == {"encoder_layers": [0, 2]}
    assert kept_blocks("student", "other", parents, details_by_step) == {}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sqnr")
    tiny.write_marian(folder / "m", encoder_layers=3)
    return folder


def compared(home, out, stage, settings, kept_blocks_of=None):
    split = tiny.read_pairs(home)
    ctx = harness.run_stage(stage, settings, home / "m", out, data=split)
    baseline = tiny.as_artifact(home / "m")
    comparison = LayerComparison(baseline, SampleSource(split, "translation", 4, 0), "cpu")
    step = Artifact(ctx.out, baseline.manifest)
    return comparison.compare(step, kept_blocks_of(ctx) if kept_blocks_of else {})


def unlabeled():
    return Split("rows", (Example("a man walks"), Example("two dogs")))


def test_classifier_samples_need_no_labels(tmp_path):
    folder = tiny.write_bert(tmp_path / "m")
    baseline = tiny.as_artifact(folder, "text-classification")
    comparison = LayerComparison(baseline, SampleSource(unlabeled(), "text-classification", 4, 0), "cpu")
    comparison_report = comparison.compare(baseline, {})
    assert (
        comparison_report["samples"],
        comparison_report["output_sqnr_db"],
        changed(comparison_report["layers"]),
    ) == (2, None, {})
    assert comparison_report["layers"]


def test_artifacts_of_stages_are_compared_on_samples(home, tmp_path, monkeypatch):
    comparison_report = compared(
        home, tmp_path / "p", Prune(), PruneSettings(targets=["heads", "ffn"], keep_ratio=0.5)
    )
    assert (comparison_report["samples"], comparison_report["reason"]) == (4, None)
    blocks = {name for name, kind in changed(comparison_report["layers"]) if kind == "block"}
    assert len(blocks) == 5  # narrower parts have outputs of the same width
    pruned = comparison_report["output_sqnr_db"]
    comparison_report = compared(home, tmp_path / "q", Quantize(), QuantizeSettings(scheme="int8-dynamic"))
    assert pruned < 10 < 15 < comparison_report["output_sqnr_db"] < 60
    settings = DropLayersSettings(encoder_layers=2)
    comparison_report = compared(
        home, tmp_path / "d", DropLayers(), settings, lambda ctx: ctx.details["kept_layers"]
    )
    assert [entry["part"] for entry in comparison_report["layers"] if entry["removed"]] == ["block"]
    with pytest.raises(NotComparableError):
        LayerComparison(tiny.as_artifact(home / "m"), SampleSource(unlabeled(), "translation", 4, 0), "cpu")
    monkeypatch.setattr(layer_sqnr, "_MEMORY_SHARE", -1)
    with pytest.raises(NotComparableError):
        LayerComparison(
            tiny.as_artifact(home / "m"), SampleSource(tiny.read_pairs(home), "translation", 4, 0), "cpu"
        )
