"""Importance scores of the channels of the hidden states.

Shapes: B = batch, S = tokens, D = channels of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from smelt.calibration.samples import model_outputs
from smelt.models.families.model_blocks import model_attentions, norm_consumers
from smelt.models.families.registry import family_of
from smelt.models.hidden_width import hidden_axes
from smelt.training.samples import TensorBatch


def hidden_norms(model: Any) -> list[nn.Module]:
    """Return the norms of the hidden states of `model`, each once, in the order of computation."""
    family: Any = family_of(model)
    of_heads = {norm for attention in model_attentions(model) for norm in attention.qk_norms or ()}
    names = [feed.norm for feed in norm_consumers(model) if feed.norm not in of_heads]
    return [model.get_submodule(name) for name in names if name not in family.head_modules]


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
        by_row = result.double().abs().reshape(sizes[-1], -1, width)
        rows = by_row.mean(dim=1).square().sum(dim=0).cpu()
        squares[norm] = squares.get(norm, torch.zeros(width, dtype=torch.float64)) + rows

    handles = [norm.register_forward_hook(see) for norm in hidden_norms(model)]
    try:
        for _ in model_outputs(model, counted()):
            pass
    finally:
        for handle in handles:
            handle.remove()
    total = torch.zeros(width, dtype=torch.float64)
    for found in squares.values():
        total += found.sqrt()
    return total


def gradient_scores(
    model: Any,
    width: int,
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    squared: bool,
) -> Tensor:
    """Return the importance of each channel by the gradient of a mask m = 1 on all norm outputs, float64 [D].

    The sum over batches of |dL/dm| (taylor), or their mean of (dL/dm)^2 if `squared` (fisher), as for heads
    and neurons.

    Args:
        model: in eval mode.
        width: D.
        batches: labelled samples, on the device of the model; one sample per batch if squared.
        loss_of: returns the mean loss of a model on a batch.
        squared: whether to compute fisher instead of taylor.
    """
    found, count = torch.zeros(width, dtype=torch.float64), 0
    with _hidden_mask(model, width) as mask:
        for batch in batches:
            (slope,) = torch.autograd.grad(loss_of(model, batch), [mask])
            found += (slope.double().square() if squared else slope.double().abs()).cpu()
            count += 1
    return found / max(1, count) if squared else found


@contextmanager
def _hidden_mask(model: Any, width: int) -> Iterator[Tensor]:
    mask = torch.ones(width, requires_grad=True, device=next(model.parameters()).device)
    handles = [norm.register_forward_hook(lambda m, x, y: y * mask) for norm in hidden_norms(model)]
    try:
        yield mask
    finally:
        for handle in handles:
            handle.remove()


def channel_magnitudes(model: Any) -> Tensor:
    """Return the L2 norm of all weights that read, output or normalize each channel, float64 [D]."""
    squares: list[Tensor] = []
    seen: set[tuple[str, int]] = set()
    for axis in hidden_axes(model):
        if axis.stream != "hidden" or (axis.name, axis.dim) in seen:
            continue
        seen.add((axis.name, axis.dim))
        owner, _, last = axis.name.rpartition(".")
        tensor: Tensor = getattr(model.get_submodule(owner), last)
        squares.append(tensor.detach().double().transpose(0, axis.dim).flatten(1).square().sum(dim=1)
                       if tensor.dim() > 1 else tensor.detach().double().square())  # fmt: skip
    return torch.stack(squares).sum(dim=0).sqrt()
