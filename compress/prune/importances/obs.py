"""Optimal brain surgeon: the loss of removing a unit when the others make up for it.

For the layer y = W x that reads the units, H is the mean of x x^T on calibration samples, and G the sum of
g g^T for the gradients g of the total loss by y at each token. Removing the columns S of a unit and changing
the others so that the loss is least in the second order costs

    1/2 trace(G W_S ((H^-1)_SS)^-1 W_S^T),   W <- W - W_S ((H^-1)_SS)^-1 (H^-1)_S,:

(Hassibi & Stork 1992, Second order derivatives for network pruning; for structures ZipLM, Kurtic et al. 2023,
arXiv:2302.04089, equations 2 and 3, there with G = I; with H and G as the factors of the Fisher information:
van der Ouderaa et al. 2024, The LLM Surgeon, arXiv:2312.17244). The cheapest unit is removed, W and H^-1 are
updated, and so on: of two units that compute the same, the first is cheap and then the second is not. H is
damped and, where the layer has a bias, taken around the means, as in `reconstruct`, which fits the weights.
Units without input cost nothing.

The large matrices are updated for several units at once: the candidates of a round, the cheapest ones, are
removed one by one from their part of W and H^-1, as long as they remain cheaper than all other units
were before.

Shapes: N = outputs, K = inputs, U = units left, w = columns of a unit, c = candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smelt.calibration.samples import load_calibration_samples
from smelt.calibration.statistics import collect_statistics
from smelt.compress.prune.importances.scores import Groups, ScoredModel, UnitScores, score_on_labeled_samples
from smelt.compress.prune.reconstruct import RECONSTRUCTION_DAMPING, bias_owner
from smelt.compress.prune.units import AttentionGroup, FeedForwardGroup, linear_with_inputs, whole_weight
from smelt.core.errors import InputError
from smelt.core.near_ties import is_better
from smelt.training.losses import label_objective

_MIN_CANDIDATES, _MAX_ROUNDS = 8, 512
_DEAD = 1e-12  # variance of an input without values, relative to the largest


def score_units(scored: ScoredModel, groups: Groups) -> UnitScores:
    """Return the scores of heads and neurons.

    Raises:
        InputError: there are no labeled samples, or inputs of a layer are not finite.
    """
    model, ctx = scored.model, scored.ctx
    attentions, blocks = groups
    both: list[AttentionGroup | FeedForwardGroup] = [*attentions, *blocks]
    readers = {g.name: g.structure.out for g in attentions} | {b.name: b.structure.down for b in blocks}
    curvatures = score_on_labeled_samples(
        scored, lambda batches: output_curvatures(model, readers, batches), single=True
    )
    samples = load_calibration_samples(
        model, scored.src, scored.settings.calibration_samples, ctx, "prune", padded=True
    )
    layers = {name: [linear_with_inputs(model, reader)] for name, reader in readers.items()}
    scores: dict[str, Tensor] = {}
    with collect_statistics(model, samples, layers, ctx) as statistics:
        for group in both:
            reader, inputs = readers[group.name], statistics.pop(group.name)
            has_bias = bias_owner(model.get_submodule(reader)).bias is not None
            moment = inputs.centered_second_moment() if has_bias else inputs.second_moment
            assert moment is not None
            if not bool(moment.diagonal().isfinite().all()):
                raise InputError(
                    f"prune: {reader}: the layer's inputs on samples of {samples.origin} are not finite. The"
                    " training before this step has probably diverged; lower its learning_rate.",
                    code="non-finite-activations",
                )
            weight = _square_root(curvatures[group.name]) @ whole_weight(model, reader).double()
            scores[group.name] = removal_losses(weight, moment / max(1, inputs.tokens), group.count(model))
            ctx.progress(len(scores), len(readers), "importance")
    heads = {group.name: scores[group.name] for group in attentions}
    neurons = {block.name: scores[block.name] for block in blocks}
    return UnitScores(heads, neurons, comparable_across_layers=True)


def output_curvatures(
    model: nn.Module, readers: Mapping[str, str], batches: Iterable[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return G, float64 [N, N] on the CPU, by the key of each layer.

    Args:
        model: in eval mode, on the device of `batches`.
        readers: names of layers, linear or factorized, by any key.
        batches: labeled samples; the loss of a batch counts as often as it has labels.
    """
    loss_of = label_objective()
    sums: dict[str, Tensor] = {}
    outputs: list[tuple[str, Tensor]] = []

    def add_zeros(key: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            zeros = torch.zeros_like(output, requires_grad=True)
            outputs.append((key, zeros))
            return output + zeros

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(add_zeros(key)) for key, name in readers.items()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:  # whose gradients, and the inputs for them, are not needed
            parameter.requires_grad_(False)
        for batch in batches:
            outputs.clear()
            loss = loss_of(model, batch) * int((batch["labels"] != -100).sum())
            gradients = torch.autograd.grad(loss, [zeros for _, zeros in outputs])
            for (key, _), gradient in zip(outputs, gradients, strict=True):
                g = gradient.flatten(0, -2).double()
                sums[key] = sums.get(key, 0) + (g.t() @ g).cpu()
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for handle in hooks:
            handle.remove()
    return sums


def _square_root(curvature: Tensor) -> Tensor:
    """Return R with R^T R = G, float64 [N, N]."""
    values, vectors = torch.linalg.eigh(curvature)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()).t()
    return root


@torch.no_grad()
def removal_losses(weight: Tensor, moment: Tensor, units: int, candidates: int | None = None) -> Tensor:
    """Return the cost of each unit's removal after those of the cheaper ones, float64 [units].

    A unit that is removed later never costs less.

    Args:
        weight: R W with R^T R = G, float [N, K].
        moment: H, float64 [K, K].
        units: each owns the same number of successive columns.
        candidates: of a round; default: a 512th of the units, at least 8.
    """
    weight, width = weight.double().clone(), weight.shape[1] // units
    candidates = candidates or max(_MIN_CANDIDATES, -(-units // _MAX_ROUNDS))
    variances = moment.diagonal()
    weight[:, variances <= _DEAD * float(variances.max())] = 0
    if not float(variances.max()) > 0:  # no sample reached it
        return torch.zeros(units, dtype=torch.float64)
    damped = moment.clone()
    damped.diagonal().add_(RECONSTRUCTION_DAMPING * float(variances.mean()))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    left, offsets = torch.arange(units), torch.arange(width)
    removed_units: list[Tensor] = []
    costs: list[float] = []
    while len(left):
        columns = left.unsqueeze(1) * width + offsets
        losses = _unit_losses(weight, inverse, columns)
        cheapest = losses.argsort()[:candidates].sort().values
        candidate_columns = columns[cheapest].flatten()
        order, round_costs = _remove_one_by_one(
            weight[:, candidate_columns],
            inverse[candidate_columns][:, candidate_columns],
            width,
            float(losses[cheapest].max()),
        )
        chosen = cheapest[order]
        removed = columns[chosen].flatten()
        update = torch.linalg.solve(inverse[removed][:, removed], inverse[removed])
        weight.addmm_(weight[:, removed], update, alpha=-1)
        inverse.addmm_(inverse[:, removed], update, alpha=-1)
        removed_units.append(left[chosen])
        costs += round_costs
        left = left[torch.isin(left, left[chosen], invert=True)]
    ascending = torch.tensor(costs, dtype=torch.float64).clamp(min=0).cummax(dim=0).values
    # of equal costs the later removal is ranked higher
    ascending += torch.arange(units) * 1e-12 * ascending[-1]
    scores = torch.empty(units, dtype=torch.float64)
    scores[torch.cat(removed_units)] = ascending
    return scores


def _unit_losses(weight: Tensor, inverse: Tensor, columns: Tensor) -> Tensor:
    """Return the loss of removing each unit, float64 [U]. columns: of each unit, int64 [U, w]."""
    blocks = inverse[columns.unsqueeze(2), columns.unsqueeze(1)]  # [U, w, w]
    owned = weight[:, columns].permute(1, 2, 0)  # [U, w, N]
    losses: Tensor = (owned * torch.linalg.solve(blocks, owned)).sum(dim=(1, 2)) / 2
    return losses


def _remove_one_by_one(
    weight: Tensor, inverse: Tensor, width: int, limit: float
) -> tuple[list[int], list[float]]:
    """Return the candidates to remove, in this order, at least one, and what each costs then.

    Args:
        weight: their columns of W, float64 [N, c * w]; changed in place.
        inverse: their part of H^-1, float64 [c * w, c * w]; changed in place.
        width: columns of a unit.
        limit: candidates that cost more are left.
    """
    order: list[int] = []
    costs: list[float] = []
    left = torch.arange(weight.shape[1] // width)
    while len(left):
        columns = left.unsqueeze(1) * width + torch.arange(width)
        losses = _unit_losses(weight, inverse, columns)
        cheapest = int((~is_better(losses.min(), losses)).int().argmax())  # the first of nearly equal ones
        if order and float(losses[cheapest]) > limit:
            break
        order.append(int(left[cheapest]))
        costs.append(float(losses[cheapest]))
        removed = columns[cheapest]
        update = torch.linalg.solve(inverse[removed][:, removed], inverse[removed])
        weight.addmm_(weight[:, removed].clone(), update, alpha=-1)
        inverse.addmm_(inverse[:, removed].clone(), update, alpha=-1)
        left = left[left != left[cheapest]]
    return order, costs
