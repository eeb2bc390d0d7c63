"""Scores of optimal brain surgeon against refits by least squares and gradients of single tokens."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from smelt.compress.prune.importances.obs import output_curvatures, removal_losses
from smelt.compress.prune.reconstruct import RECONSTRUCTION_DAMPING
from smelt.compress.prune.units import find_groups
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
