"""Activation: the magnitude of the hidden states, on calibration samples without labels.

Shapes: B = batch, S = tokens, D = channels of the hidden states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from smelt.calibration.samples import load_calibration_samples, model_outputs
from smelt.compress.prune.importances.scores import ScoredModel, distance_norms, hidden_norms
from smelt.runtimes.device import torch_device
from smelt.tasks.samples import TensorBatch


def score_width(scored: ScoredModel, width: int) -> Tensor:
    """Return the scores of the channels of the hidden states, float64 [D]."""
    settings, ctx = scored.settings, scored.ctx
    samples = load_calibration_samples(scored.model, scored.src, settings.calibration_samples, ctx, "prune")
    device = torch_device(ctx.device)
    try:
        batches = ({n: v.to(device) for n, v in batch.items()} for batch in samples.batches)
        return activation_scores(scored.model.to(device), width, batches)
    finally:
        scored.model.to("cpu")


def activation_scores(model: Any, width: int, batches: Iterable[TensorBatch]) -> Tensor:
    """Return the activation magnitude of each channel at the norm outputs, float64 [D].

    The sum over norms of the L2 norm over samples of the mean over tokens of |y|, with y the norm output.
    Source: Muralidharan et al. 2024, Compact Language Models via Pruning and Knowledge Distillation
    (Minitron), arXiv:2407.14679, section 2.2, aggregated by mean over tokens and L2 over samples.

    Args:
        model: in eval mode.
        width: D.
        batches: inputs without padding, on the device of the model.
    """
    squares: dict[nn.Module, Tensor] = {}
    sizes: list[int] = []

    def counted() -> Iterator[TensorBatch]:
        for batch in batches:
            sizes.append(len(next(iter(batch.values()))))
            yield batch

    def see(norm: nn.Module, _: Any, result: Tensor) -> None:
        # [B, ..., D], or [B S, D] if the model flattens its states
        by_sample = result.double().abs().reshape(sizes[-1], -1, width)
        batch_squares = by_sample.mean(dim=1).square().sum(dim=0).cpu()
        squares[norm] = squares.get(norm, torch.zeros(width, dtype=torch.float64)) + batch_squares

    norms = [norm for norm in hidden_norms(model) if norm not in distance_norms(model)]
    handles = [norm.register_forward_hook(see) for norm in norms]
    try:
        for _ in model_outputs(model, counted()):
            pass
    finally:
        for handle in handles:
            handle.remove()
    total = torch.zeros(width, dtype=torch.float64)
    for norm_squares in squares.values():
        total += norm_squares.sqrt()
    return total
