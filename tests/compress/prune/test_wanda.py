"""Wanda's scores of units against its formula, weight by weight, and a model pruned without labels."""

import pytest
import torch

from smelt.calibration.samples import CalibrationSamples
from smelt.compress.prune.importances.wanda import wanda_scores
from smelt.compress.prune.settings import PruneSettings
from smelt.compress.prune.stage import Prune
from smelt.compress.prune.units import find_groups, whole_weight
from smelt.core.errors import InputError
from smelt.data.splits import Example, Split
from smelt.models.checkpoint import load_model, load_tokenizer
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import embedders, tiny
from tests.support.models.pruning_models import bert_model, example_batch, factorized_model, marian_model


def _rows(batch):
    """Return the samples of a batch, each alone and without its padding."""
    samples = []
    for index, mask in enumerate(batch["attention_mask"]):
        row = {name: value[index : index + 1] for name, value in batch.items()}
        count = int(mask.sum())
        samples.append(row | {n: row[n][:, :count] for n in ("input_ids", "attention_mask")})
    return samples


def _inputs(model, name, rows):
    """Return the inputs of a layer on all rows, [tokens, K]."""
    inputs = []
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda module, args: inputs.append(args[0].detach().flatten(0, -2))
    )
    with torch.no_grad():
        for row in rows:
            model(**row)
    handle.remove()
    return torch.cat(inputs)


@pytest.mark.quick
@pytest.mark.parametrize("build", [bert_model, marian_model, factorized_model])
def test_wanda_score_equals_formula_and_ignores_padding(build, tmp_path):
    model = build()
    attentions, blocks = find_groups(model)
    batch = example_batch(model)
    samples = CalibrationSamples("x", [batch], 3, int(batch["attention_mask"].sum()))
    unit_scores = wanda_scores(model, attentions, blocks, samples, harness.make_context(tmp_path / "out"))
    assert not unit_scores.comparable_across_layers
    units = [(g.name, g.structure.out, g.head_dim(model), unit_scores.heads) for g in attentions]
    units += [(b.name, b.structure.down, 1, unit_scores.neurons) for b in blocks]
    for name, reader, width, scores in units:
        weight, x = whole_weight(model, reader).double(), _inputs(model, reader, _rows(batch)).double()
        assert len(scores[name]) == weight.shape[1] // width
        for unit, score in enumerate(scores[name]):
            owned = range(unit * width, (unit + 1) * width)
            expected = sum(
                abs(float(weight[i, j])) * float(x[:, j].square().sum()) ** 0.5
                for i in range(len(weight))
                for j in owned
            )
            assert float(score) == pytest.approx(expected, rel=1e-4)
    assert set(unit_scores.heads) == {g.name for g in attentions}
    assert set(unit_scores.neurons) == {b.name for b in blocks}


def _prune(source, out, data, **settings):
    return harness.run_stage(
        Prune(), PruneSettings(importance="wanda", **settings), source, out, embedders.TASK, data
    )


def test_unlabeled_pruning_keeps_units_with_highest_wanda_scores(tmp_path):
    source = embedders.write_embedder(tmp_path / "model")
    model, _ = load_model(source)
    rows = Split("x", tuple(Example(text) for text in tiny.SENTENCES))
    ctx = _prune(
        source,
        tmp_path / "out",
        {"calibration": rows},
        targets=["heads", "ffn"],
        keep_ratio=0.5,
        reconstruct=False,
    )
    pruned, _ = load_model(ctx.out)
    _, blocks = find_groups(model)
    tokenizer = load_tokenizer(source)
    texts = [dict(tokenizer(text, return_tensors="pt")) for text in tiny.SENTENCES]
    for block in blocks:
        before, after = (m.get_submodule(block.structure.up).weight for m in (model, pruned))
        kept_neurons = [int((before == row).all(dim=1).nonzero()) for row in after]
        norms = _inputs(model, block.structure.down, texts).double().norm(dim=0)
        scores = model.get_submodule(block.structure.down).weight.double().abs().sum(dim=0) * norms
        assert kept_neurons == scores.topk(len(before) // 2).indices.sort().values.tolist()
    assert set(ctx.details["kept_heads"].values()) == {2}


def test_wanda_needs_samples_and_supports_heads_and_ffn_only(tmp_path):
    wanda = PruneSettings(importance="wanda")
    assert Prune.needs_with(wanda, ()) == {"train"}
    assert Prune.needs_with(wanda, {"train", "calibration"}) == {"calibration"}
    with raises_code("no-calibration-data", InputError):
        _prune(embedders.write_embedder(tmp_path / "model"), tmp_path / "out", {})
    with raises_setting_codes("wrong-importance"):
        PruneSettings(importance="wanda", targets=["width"])
    with raises_setting_codes("wrong-importance"):
        PruneSettings(importance="wanda", budget={"parameters": 0.5})
    assert PruneSettings(importance="wanda", targets=["ffn"], budget={"parameters": 0.5}).budget
