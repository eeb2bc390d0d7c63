"""Scores of optimal brain surgeon against refits by least squares and gradients of single tokens."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from smelt.compress.prune import stage
from smelt.compress.prune.importances.obs import output_curvatures, removal_losses
from smelt.compress.prune.reconstruct import RECONSTRUCTION_DAMPING
from smelt.compress.prune.settings import PruneSettings, obs_bytes
from smelt.compress.prune.stage import Prune
from smelt.compress.prune.units import find_groups, whole_weight
from smelt.models.checkpoint import load_model
from smelt.models.families.registry import FAMILIES
from smelt.models.model_size import SizeInputs, read_model_size
from tests.support.models import every_family
from tests.support.models.pruning_models import bert_model, example_batch, factorized_model, marian_model


def _least_loss(weight, damped, removed):
    """Return 1/2 tr(D H D^T) for the best change D of `weight` that makes the columns `removed` zero."""
    rest = [column for column in range(weight.shape[1]) if column not in removed]
    change = torch.zeros_like(weight)
    change[:, removed] = -weight[:, removed]
    if rest:
        factor = torch.linalg.cholesky(damped).t()  # tr(D H D^T) = |factor D^T|^2
        target = -factor[:, removed] @ change[:, removed].t()
        change[:, rest] = torch.linalg.lstsq(factor[:, rest], target).solution.t()
    return float(((change @ damped) * change).sum()) / 2


@pytest.mark.quick
@pytest.mark.parametrize("width", [1, 3])
def test_losses_and_order_equal_greedy_least_squares(width):
    generator = torch.Generator().manual_seed(0)
    units = 6
    inputs = torch.randn(40, units * width, dtype=torch.float64, generator=generator)
    inputs[:, :width] = inputs[:, -width:] + 0.01 * inputs[:, :width]  # the first and the last agree
    weight = torch.randn(5, units * width, dtype=torch.float64, generator=generator)
    moment = inputs.t() @ inputs / len(inputs)
    damped = moment + RECONSTRUCTION_DAMPING * moment.diagonal().mean() * torch.eye(
        units * width, dtype=torch.float64
    )
    columns = [list(range(unit * width, (unit + 1) * width)) for unit in range(units)]
    order, losses, removed, total = [], [], [], 0.0
    while len(order) < units:
        candidates = {
            unit: _least_loss(weight, damped, removed + columns[unit])
            for unit in range(units)
            if unit not in order
        }
        unit = min(candidates, key=candidates.get)
        losses.append(candidates[unit] - total)
        total = candidates[unit]
        order.append(unit)
        removed += columns[unit]
    scores = removal_losses(weight, moment, units)
    assert scores.argsort().tolist() == order
    assert scores[order].tolist() == pytest.approx(
        torch.tensor(losses, dtype=torch.float64).cummax(0).values.tolist(), rel=1e-8
    )
    without_update = [_least_loss(weight, damped, unit_columns) for unit_columns in columns]
    both = {0, units - 1}  # cheap alone, not together
    assert both <= set(torch.tensor(without_update).argsort()[:3].tolist())
    for candidates in (1, 3):
        in_rounds = removal_losses(weight, moment, units, candidates)
        torch.testing.assert_close(in_rounds, scores, rtol=1e-6, atol=0)


@pytest.mark.quick
def test_units_without_input_are_removed_first():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 6, dtype=torch.float64, generator=generator)
    inputs[:, [2, 5]] = 0
    scores = removal_losses(torch.full((3, 6), 100.0), inputs.t() @ inputs / 40, 6)
    assert set(scores.argsort()[:2].tolist()) == {2, 5}
    assert scores[[2, 5]].tolist() == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.quick
def test_unit_removed_later_ranks_higher_also_if_it_costs_less():
    """Two inputs nearly cancel: without the first, the weight of the second becomes small."""
    generator = torch.Generator().manual_seed(0)
    first, noise = torch.randn(2, 100, dtype=torch.float64, generator=generator)
    inputs = torch.stack([first, -first + 0.5 * noise])
    scores = removal_losses(torch.ones(1, 2), inputs @ inputs.t() / 100, 2)
    assert scores[0] < scores[1]
    assert scores[1] == pytest.approx(float(scores[0]))


@pytest.mark.quick
def test_layer_without_inputs_has_no_losses():
    assert removal_losses(torch.ones(3, 8), torch.zeros(8, 8, dtype=torch.float64), 4).tolist() == [0.0] * 4


@pytest.mark.parametrize("build", [bert_model, marian_model, factorized_model])
def test_curvature_is_sum_of_outer_products_of_token_gradients(build):
    model = build().double()
    batch = example_batch(model)
    logits = model(**batch).logits
    labels = (batch.get("decoder_input_ids", batch["input_ids"][:, :1]) % logits.shape[-1]).clone()
    if logits.dim() == 2:
        labels = labels[:, 0]
    else:
        labels[0, 0] = -100
    attentions, blocks = find_groups(model)
    readers = {attentions[0].name: attentions[0].structure.out, blocks[-1].name: blocks[-1].structure.down}
    curvatures = output_curvatures(model, readers, [{**batch, "labels": labels}])
    for key, name in readers.items():
        outputs = []
        collect = outputs.append
        handle = model.get_submodule(name).register_forward_hook(lambda _, __, y, add=collect: add(y))
        logits = model(**batch).logits
        handle.remove()
        losses = cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
        (gradient,) = torch.autograd.grad(losses, outputs)
        expected = sum(torch.outer(g, g) for g in gradient.flatten(0, -2))
        torch.testing.assert_close(
            curvatures[key], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
        )
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.quick
def test_units_of_nearly_equal_losses_are_removed_in_their_order():
    weight = torch.ones(1, 4, dtype=torch.float64)
    weight[0, 0] += 1e-7
    scores = removal_losses(weight, torch.eye(4, dtype=torch.float64), 4)
    assert scores.argsort().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("family", ["marian", "t5", "bert", "llama", "gpt2", "vit"])
def test_estimated_memory_has_matrices_of_all_layers(family, monkeypatch):
    """G of the outputs and H of the inputs, float64; H is on disk where there is too much of it."""
    folder = every_family.model_with_layers(family, 2)
    size = read_model_size(folder, json.loads((folder / "config.json").read_text()))
    model, _ = load_model(folder)
    attentions, blocks = find_groups(model)
    readers = [g.structure.out for g in attentions] + [b.structure.down for b in blocks]
    shapes = [whole_weight(model, name).shape for name in readers]
    expected = tuple(8 * sum(shape[axis] ** 2 for shape in shapes) for axis in (0, 1))
    assert obs_bytes(size) == expected
    settings = PruneSettings(importance="obs", targets=["heads", "ffn"])
    inputs = SizeInputs(size, size, FAMILIES[family].tasks[0], {})
    in_memory = Prune.estimate_size(settings, inputs)
    assert (in_memory.memory_bytes, in_memory.temporary_bytes) == (size.float_bytes + sum(expected), 0)
    monkeypatch.setattr(stage, "STATISTICS_MEMORY_BYTES", expected[1] - 1)
    on_disk = Prune.estimate_size(settings, inputs)
    assert on_disk.memory_bytes == size.float_bytes + expected[0]
    assert on_disk.temporary_bytes == expected[1]
