"""Scores of units, recomputed by hand; those of factorized layers are those of the products."""

import pytest
import torch

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.prune.importances.magnitude import magnitude_scores
from smelt.compress.prune.importances.taylor import taylor_scores
from smelt.compress.prune.stage import Prune, PruneSettings
from smelt.compress.prune.units import find_groups, linear_with_inputs, linear_with_outputs
from smelt.models.checkpoint import load_model, save_model
from smelt.models.layers import LowRankLinear
from smelt.training.losses import label_objective
from tests.support import harness
from tests.support.models import causal, every_family, seq2seq, tiny
from tests.support.models.pruning_models import bert_model, example_batch, example_loss, factorized_model

RANK = 5
MADE = {
    "marian": lambda f: tiny.write_marian(f, d_model=64),
    "t5-gated": lambda f: seq2seq.write_t5(f, gated=True),
    "gpt2": lambda f: causal.write_model(f, "gpt2"),
}


@pytest.fixture(params=MADE)
def both(request, tmp_path):
    """A model whose matrices have rank 5, and the same one factorized without any loss."""
    folder = MADE[request.param](tmp_path / "first")
    model, edits = load_model(folder)
    torch.manual_seed(3)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            rows, columns = module.weight.shape
            with torch.no_grad():
                # rows and columns of very different lengths, so that the order of units is clear
                factor = torch.randn(rows, RANK) * torch.linspace(0.2, 3, rows)[:, None]
                module.weight.copy_(factor @ torch.randn(RANK, columns) / RANK)
    (tmp_path / "whole").mkdir()
    save_model(model, edits, tmp_path / "whole", folder)
    source = tiny.as_artifact(tmp_path / "whole")
    Factorize()(
        source,
        FactorizeSettings(method="svd", optimize_for="size", rank=RANK),
        harness.make_context(tmp_path / "pairs"),
    )
    return tmp_path / "whole", tmp_path / "pairs"


def test_magnitude_of_low_rank_layer_equals_product(both):
    original, pairs = (load_model(folder)[0] for folder in both)
    assert sum(isinstance(m, LowRankLinear) for m in pairs.modules()) >= 8
    expected, got = (magnitude_scores(m, *find_groups(m)) for m in (original, pairs))
    for name, scores in {**expected.heads, **expected.neurons}.items():
        torch.testing.assert_close({**got.heads, **got.neurons}[name], scores, rtol=1e-4, atol=1e-5)


def test_same_units_are_kept_for_factorized_layer(both, tmp_path):
    settings = PruneSettings(keep_ratio=0.5, importance="magnitude", multiple_of=1)
    products_by_model = []
    for index, folder in enumerate(both):
        ctx = harness.make_context(tmp_path / str(index))
        Prune()(tiny.as_artifact(folder), settings, ctx)
        model, _ = load_model(ctx.out)
        products = {}
        for name, module in model.named_modules():
            if isinstance(module, LowRankLinear):
                products[name] = module.up.weight @ module.down.weight
            elif isinstance(module, torch.nn.Linear) and not name.endswith((".up", ".down")):
                products[name] = module.weight
        products_by_model.append(products)
    assert products_by_model[0].keys() == products_by_model[1].keys()
    for name, product in products_by_model[0].items():
        torch.testing.assert_close(
            products_by_model[1][name], product, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n} {m}"
        )


def test_taylor_of_low_rank_layer_equals_product(tmp_path):
    """Both halves are differentiated, and w . dL/dw of a unit is the same on either side of the rank."""
    folder = tiny.write_bert(tmp_path / "first", hidden_size=64)
    model, edits = load_model(folder)
    torch.manual_seed(3)
    for module in model.bert.encoder.modules():
        if isinstance(module, torch.nn.Linear):
            with torch.no_grad():
                rows, columns = module.weight.shape
                module.weight.copy_(torch.randn(rows, RANK) @ torch.randn(RANK, columns) / RANK / 8)
    (tmp_path / "whole").mkdir()
    save_model(model, edits, tmp_path / "whole", folder)
    Factorize()(
        tiny.as_artifact(tmp_path / "whole"),
        FactorizeSettings(method="svd", optimize_for="size", rank=RANK),
        harness.make_context(tmp_path / "pairs"),
    )
    ids = torch.arange(5, 25).view(2, 10)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1])}
    unit_scores = []
    for name in ("whole", "pairs"):
        loaded, _ = load_model(tmp_path / name)
        unit_scores.append(taylor_scores(loaded, *find_groups(loaded), [batch], label_objective()))
    for name, scores in {**unit_scores[0].heads, **unit_scores[0].neurons}.items():
        got = {**unit_scores[1].heads, **unit_scores[1].neurons}[name]
        torch.testing.assert_close(got, scores, rtol=2e-3, atol=1e-6)


def test_taylor_head_score_is_loss_gradient_of_head_scale():
    model = bert_model().double()
    attentions, blocks = find_groups(model)
    batches = [example_batch(model), {k: v[:2] for k, v in example_batch(model).items()}]
    scores = taylor_scores(model, attentions, blocks, batches, example_loss)
    group, head, step = attentions[1], 2, 1e-4
    weight = linear_with_inputs(model, group.structure.out).weight
    width = group.head_dim(model)
    original = weight.detach().clone()
    total = 0.0
    for batch in batches:  # scaling a head's output is scaling its columns of the output product
        values = []
        for scale in (1 + step, 1 - step):
            with torch.no_grad():
                weight.copy_(original)
                weight[:, head * width : (head + 1) * width] *= scale
                values.append(float(example_loss(model, batch)))
        total += abs(values[0] - values[1]) / (2 * step)
    assert float(scores.heads[group.name][head]) == pytest.approx(total, rel=1e-2)


@pytest.mark.parametrize("build", [bert_model, factorized_model])
def test_taylor_neuron_score_equals_dynabert_formula(build):
    model = build()
    attentions, blocks = find_groups(model)
    batch, block = example_batch(model), blocks[0]
    first, second = (
        linear_with_outputs(model, block.structure.up),
        linear_with_inputs(model, block.structure.down),
    )
    torch.nn.init.normal_(first.bias)
    scores = taylor_scores(model, attentions, blocks, [batch, batch], example_loss)
    w1, b1, w2 = torch.autograd.grad(example_loss(model, batch), [first.weight, first.bias, second.weight])
    model.requires_grad_(False)
    n = 3
    by_hand = abs(float((first.weight[n] * w1[n]).sum() + first.bias[n] * b1[n])) + abs(
        float((second.weight[:, n] * w2[:, n]).sum())
    )
    assert float(scores.neurons[block.name][n]) == pytest.approx(2 * by_hand, rel=1e-4)
    assert all(p.grad is None for p in model.parameters())


GATED = {
    "t5-gated": lambda f: seq2seq.write_t5(f, gated=True),
    "llama": lambda f: causal.write_model(f, "llama"),
}


@pytest.fixture(params=GATED)
def gated(request, tmp_path):
    model, _ = load_model(GATED[request.param](tmp_path / "model"))
    return model, find_groups(model)[1]


def test_taylor_of_gated_neuron_includes_gate(gated):
    model, blocks = gated
    batch = example_batch(model)
    scores = taylor_scores(model, [], blocks, [batch], example_loss)
    for block in blocks:
        assert block.structure.gate is not None
        parts = [
            model.get_submodule(name).weight
            for name in (block.structure.up, block.structure.gate, block.structure.down)
        ]
        slopes = torch.autograd.grad(example_loss(model, batch), parts)
        terms = [
            (part * slope).sum(dim=dim).abs().double()
            for part, slope, dim in zip(parts, slopes, (1, 1, 0), strict=True)
        ]
        torch.testing.assert_close(scores.neurons[block.name], sum(terms).detach(), rtol=1e-3, atol=1e-7)
        without = (terms[0] + terms[2]).detach()
        assert not torch.allclose(scores.neurons[block.name], without, rtol=0.05)


@pytest.mark.parametrize("family", ["marian", "t5", "llama", "phi3"])  # phi3: gate and other row in one layer
def test_neuron_magnitude_multiplies_norms_including_gate(family):
    model, _ = load_model(every_family.model_with_layers(family, 2))
    blocks = find_groups(model)[1]
    scores = magnitude_scores(model, [], blocks).neurons
    for block in blocks:
        down, count = model.get_submodule(block.structure.down).weight.double(), block.count(model)
        rows = torch.cat([model.get_submodule(name).weight for name in block.structure.input_layers]).double()
        assert len(rows) == count * (1 if family == "marian" else 2)
        expected = down.norm(dim=0) * rows.norm(dim=1).view(-1, count).prod(dim=0)
        torch.testing.assert_close(scores[block.name], expected.detach())
