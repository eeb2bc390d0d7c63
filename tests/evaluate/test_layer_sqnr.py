"""SQNR of layers, against PyTorch's compute_sqnr on hidden states that transformers returns."""

import copy
from contextlib import ExitStack

import pytest
import torch
from torch.ao.ns.fx.utils import compute_sqnr

from smelt.compress.drop_layers.stage import DropLayers, DropLayersSettings
from smelt.compress.prune.settings import PruneSettings
from smelt.compress.prune.stage import Prune
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.core import system
from smelt.core.artifact import Artifact
from smelt.data.splits import Example, Split
from smelt.evaluate.layer_sqnr import (
    LOWEST_DB,
    BlockwiseModel,
    LayerComparison,
    NotComparableError,
    SampleSource,
    compare_layers,
)
from smelt.models.checkpoint import load_model, save_model
from smelt.models.families.registry import blocks_of
from smelt.pipeline.execute.baseline_comparisons import kept_blocks
from tests.support import harness
from tests.support.models import embedders, every_family, images, tiny

BATCHES = [
    {
        "input_ids": torch.arange(5, 15).reshape(rows, -1),
        "attention_mask": torch.ones(rows, 10 // rows).long(),
    }
    for rows in (1, 2)
]


def batches_of(model):
    """The source is also the target, where there is one."""
    more = ["decoder_input_ids"] if model.config.is_encoder_decoder else []
    return [(batch, batch) for batch in [b | dict.fromkeys(more, b["input_ids"]) for b in BATCHES]]


def loaded(family, layers=3):
    model, _ = load_model(every_family.model_with_layers(family, layers))
    return model, copy.deepcopy(model)


def compared_with(model, step, folder, pairs=None, kept_positions=None):
    """Compare two models in memory: both are written, because a comparison reads their blocks."""
    sides = []
    for name, each in (("model", model), ("step", step)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        save_model(each, [], folder / name, every_family.model_with_layers(each.config.model_type, 3))
        sides.append(BlockwiseModel(folder / name))
    return compare_layers(*sides, pairs or batches_of(model), kept_positions or {})


@torch.no_grad()
def ruin(layer, scale=1.0):
    noise = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1))
    layer.weight += scale * layer.weight.std() * noise


def changed(comparison):
    """The ratios by layer, without those of rounding errors."""
    known = [one for one in comparison if one["sqnr_db"] is not None and one["sqnr_db"] < 100]
    return {(one["name"], one["part"]): one["sqnr_db"] for one in known}


@torch.no_grad()
def test_ratios_are_pytorchs_on_the_hidden_states_of_the_baseline(tmp_path):
    model, step = loaded("bert")
    first, last = step.bert.encoder.layer[0], step.bert.encoder.layer[2]
    ruin(first.intermediate.dense, 0.3)
    ruin(last.attention.output.dense, 0.1)
    ruin(step.classifier, 0.2)
    comparison = compared_with(model, step, tmp_path)
    sqnr_by_layer = changed(comparison["layers"])
    pairs, parts, outputs, heads = {0: [], 2: []}, [], [], []
    for batch in BATCHES:
        base = model(**batch, output_hidden_states=True)
        for index, layer in ((0, first), (2, last)):
            pairs[index].append((base.hidden_states[index + 1], layer(base.hidden_states[index])))
        dense = [each.bert.encoder.layer[2].attention for each in (model, step)]
        inside = [each.self(base.hidden_states[2])[0] for each in dense]
        parts.append([each.output.dense(x) for each, x in zip(dense, inside, strict=True)])
        outputs.append((base.logits, step(**batch).logits))
        pooled = model.bert.pooler(base.hidden_states[-1])
        heads.append((base.logits, step.classifier(pooled)))

    name = "bert.encoder.layer"
    assert sqnr_by_layer[f"{name}.0", "block"] == pytest.approx(torch_sqnr(pairs[0]), abs=0.01)
    assert sqnr_by_layer[f"{name}.2", "block"] == pytest.approx(torch_sqnr(pairs[2]), abs=0.01)
    assert sqnr_by_layer[f"{name}.2", "self-attention"] == pytest.approx(torch_sqnr(parts), abs=0.01)
    assert sqnr_by_layer["classifier", "output"] == pytest.approx(torch_sqnr(heads), abs=0.01)
    assert (f"{name}.1", "block") not in sqnr_by_layer  # its inputs are the baseline's
    assert comparison["output_sqnr_db"] == pytest.approx(torch_sqnr(outputs), abs=0.01)
    assert compared_with(model, model, tmp_path)["output_sqnr_db"] is None


def hidden(output):
    return output if torch.is_tensor(output) else output[0]


def run_hooked(model, batch, before, after):
    """Call the hooks `before(index, input)` and `after(index, output)` of each block of a whole model."""
    counts = [0, 0]

    def start(module, inputs):
        counts[0] += 1
        return (before(counts[0] - 1, inputs[0]), *inputs[1:])

    def end(module, inputs, output):
        counts[1] += 1
        states = after(counts[1] - 1, hidden(output))
        return states if torch.is_tensor(output) else (states, *output[1:])

    with ExitStack() as hooks:
        for block in blocks_of(model):
            hooks.callback(block.module.register_forward_pre_hook(start).remove)
            hooks.callback(block.module.register_forward_hook(end).remove)
        return model(**batch).logits


def outputs_on_baseline_states(model, step, batch):
    """Return the outputs of each block of both models, whole, on the inputs of the baseline's blocks."""
    inputs, outputs, pairs = [], [], []
    run_hooked(
        model, batch, lambda _, states: inputs.append(states) or states, lambda _, y: outputs.append(y) or y
    )
    lasts = [len(outputs) - 1, len(outputs) // 2 - 1][: 1 + model.config.is_encoder_decoder]

    def after(index, states):
        pairs.append((outputs[index], states))
        return outputs[index] if index in lasts else states

    run_hooked(step, batch, lambda index, _: inputs[index], after)
    return pairs


def torch_sqnr(pairs):
    """Return PyTorch's ratio of all samples together."""
    return float(compute_sqnr(*(torch.cat([side.flatten() for side in s]) for s in zip(*pairs, strict=True))))


@torch.no_grad()
@pytest.mark.parametrize("family", every_family.DISTINCT_FAMILIES)
def test_ratios_equal_unstreamed_models(family, tmp_path):
    model, step = loaded(family)
    for block in blocks_of(step):
        ruin(step.get_submodule(block.feed_forwards[0].down), 0.2)
    batches = [batch for batch, _ in batches_of(model)]
    comparison = compared_with(model, step, tmp_path)
    by_block = zip(*(outputs_on_baseline_states(model, step, batch) for batch in batches), strict=True)
    expected = [torch_sqnr(pairs) for pairs in by_block]
    ratios = [one["sqnr_db"] for one in comparison["layers"] if one["part"] == "block"]
    assert ratios == pytest.approx(expected, abs=0.01)
    assert max(ratios) < 60  # each block was changed
    outputs = [(model(**batch).logits, step(**batch).logits) for batch in batches]
    assert comparison["output_sqnr_db"] == pytest.approx(torch_sqnr(outputs), abs=0.01)


@pytest.mark.parametrize("family", ["marian", "t5", "opt", "gemma"])
def test_the_ruined_layer_is_named(family, tmp_path):
    """In the first block, so that an error that reached the next ones would show there."""
    model, step = loaded(family)
    last = blocks_of(step)[-1]
    block = blocks_of(step)[last.index and -1 - last.index]  # the first one of the last stack
    ruin(step.get_submodule(block.feed_forwards[0].down))
    sqnr_by_layer = changed(compared_with(model, step, tmp_path)["layers"])
    assert set(sqnr_by_layer) == {(block.module_path, "block"), (block.module_path, "feed-forward")}
    ruin(step.get_submodule(block.feed_forwards[0].down), float("nan"))
    sqnr_by_layer = changed(compared_with(model, step, tmp_path)["layers"])
    assert sqnr_by_layer[block.module_path, "block"] == LOWEST_DB


@torch.no_grad()
def test_a_removed_block_is_compared_with_its_input(tmp_path):
    model, step = loaded("gpt2")
    del step.transformer.h[1]
    step.config.n_layer = 2
    pairs = batches_of(model)
    comparison = compared_with(model, step, tmp_path, pairs, {"layers": [0, 2]})["layers"]
    assert [one["name"] for one in comparison if one["removed"]] == ["transformer.h.1"]
    states = [model(**batch, output_hidden_states=True).hidden_states[1:3] for batch in BATCHES]
    before, after = (torch.cat([s.flatten() for s in side]) for side in zip(*states, strict=True))
    assert changed(comparison) == {
        ("transformer.h.1", "block"): pytest.approx(float(compute_sqnr(after, before)), abs=0.01)
    }
    for kept_positions in ({}, {"layers": [0, 3]}, {"layers": [2, 0]}):
        with pytest.raises(NotComparableError):
            compared_with(model, step, tmp_path, pairs, kept_positions)


@torch.no_grad()
@pytest.mark.parametrize(("family", "has_blocks"), [("vit", True), ("resnet", False)])
def test_image_models_are_compared_also_without_blocks(family, has_blocks, tmp_path):
    model, step = loaded(family)
    ruin(next(layer for layer in step.modules() if isinstance(layer, torch.nn.Linear)), 0.3)
    size = (images.IMAGE_SIZE, images.IMAGE_SIZE)
    batch = {"pixel_values": torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))}
    comparison = compared_with(model, step, tmp_path, [(batch, batch)])
    outputs = [(model(**batch).logits, step(**batch).logits)]
    assert comparison["output_sqnr_db"] == pytest.approx(torch_sqnr(outputs), abs=0.01)
    assert (bool(changed(comparison["layers"])), bool(comparison["layers"])) == (has_blocks, has_blocks)


def test_sentence_embedder_equals_itself(tmp_path):
    baseline = tiny.as_artifact(embedders.write_embedder(tmp_path / "m"), "sentence-similarity")
    comparison = LayerComparison(baseline, SampleSource(unlabeled(), "sentence-similarity", 4, 0), "cpu")
    unchanged = comparison.compare(baseline, {})
    assert (unchanged["samples"], unchanged["output_sqnr_db"], changed(unchanged["layers"])) == (
        2,
        None,
        {},
    )
    assert {one["part"] for one in unchanged["layers"]} >= {"embeddings", "block", "output"}


def test_blocks_kept_by_several_steps_are_named_after_baseline(tmp_path):
    edits_by_step = {
        "drop": tiny.as_artifact(tmp_path, kept_layers={"encoder_layers": [0, 2, 3], "decoder_layers": [1]}),
        "tune": tiny.as_artifact(tmp_path),
        "student": tiny.as_artifact(tmp_path, kept_encoder_layers=[0, 2]),
    }
    parents = {"model": None, "drop": "model", "tune": "drop", "student": "tune", "other": "model"}
    kept_positions = kept_blocks("student", "model", parents, edits_by_step)
    assert kept_positions == {"encoder_layers": [0, 3], "decoder_layers": [1]}
    assert kept_blocks("student", "drop", parents, edits_by_step) == {"encoder_layers": [0, 2]}
    assert kept_blocks("student", "other", parents, edits_by_step) == {}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sqnr")
    tiny.write_marian(folder / "m", encoder_layers=3)
    return folder


def compared(home, out, stage, settings, kept_positions=None):
    rows = tiny.read_pairs(home)
    ctx = harness.run_stage(stage, settings, home / "m", out, data=rows)
    baseline = tiny.as_artifact(home / "m")
    comparison = LayerComparison(baseline, SampleSource(rows, "translation", 4, 0), "cpu")
    step = Artifact(ctx.out, baseline.manifest)
    return comparison.compare(step, kept_positions(ctx) if kept_positions else {})


def unlabeled():
    return Split("rows", (Example("a man walks"), Example("two dogs")))


def test_samples_of_classifiers_need_no_labels(tmp_path):
    folder = tiny.write_bert(tmp_path / "m")
    baseline = tiny.as_artifact(folder, "text-classification")
    comparison = LayerComparison(baseline, SampleSource(unlabeled(), "text-classification", 4, 0), "cpu")
    unchanged = comparison.compare(baseline, {})
    assert (unchanged["samples"], unchanged["output_sqnr_db"], changed(unchanged["layers"])) == (
        2,
        None,
        {},
    )
    assert unchanged["layers"]


def test_artifacts_of_stages_are_compared_on_samples(home, tmp_path, monkeypatch):
    comparison = compared(
        home, tmp_path / "p", Prune(), PruneSettings(targets=["heads", "ffn"], keep_ratio=0.5)
    )
    assert (comparison["samples"], comparison["reason"]) == (4, None)
    blocks = {name for name, part in changed(comparison["layers"]) if part == "block"}
    assert len(blocks) == 5  # narrower parts have outputs of the same width
    pruned = comparison["output_sqnr_db"]
    comparison = compared(home, tmp_path / "q", Quantize(), QuantizeSettings(scheme="int8-dynamic"))
    assert pruned < 10 < 15 < comparison["output_sqnr_db"] < 60
    settings = DropLayersSettings(encoder_layers=2)
    comparison = compared(
        home, tmp_path / "d", DropLayers(), settings, lambda ctx: ctx.details["kept_layers"]
    )
    assert [one["part"] for one in comparison["layers"] if one["removed"]] == ["block"]
    with pytest.raises(NotComparableError):
        LayerComparison(tiny.as_artifact(home / "m"), SampleSource(unlabeled(), "translation", 4, 0), "cpu")
    monkeypatch.setattr(system, "available_bytes", lambda: 1000)
    with pytest.raises(NotComparableError):
        LayerComparison(
            tiny.as_artifact(home / "m"), SampleSource(tiny.read_pairs(home), "translation", 4, 0), "cpu"
        )
