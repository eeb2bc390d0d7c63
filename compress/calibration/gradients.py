"""What the loss on labelled rows says of parameters: squared gradients (the empirical Fisher information).

The diagonal of the empirical Fisher matrix is the mean over rows of the squared gradient of each row's loss
(Hsu et al. 2022, FWSVD, arXiv:2207.00112, equation 4, where it weights the rows of a matrix). A gradient of a
batch of several rows is their mean, whose square is smaller; so rows are taken one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.calibration.statistics import placed_batches
from smelt.compress.train.data import TensorBatch
from smelt.compress.train.state import threads
from smelt.compress.train.terms import Objective, total_of
from smelt.core.errors import RunError
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device


def squared_gradients(
    model: Any,
    rows: CalibrationRows,
    parameters: Mapping[str, Tensor],
    objective: Objective,
    ctx: Context,
) -> dict[str, Tensor]:
    """Return the mean over rows of the squared gradient of a row's loss, float32 in the parameter's shape.

    Of a sentence embedder, whose loss compares pairs, it is the mean over batches.

    Args:
        model: float32, in eval mode, on the CPU; it computes on `ctx.device` meanwhile, and has no gradients
            afterwards.
        rows: with labels (`calibration_rows(..., labels=True)`).
        parameters: of the model, by a key of the caller's.
        objective: the loss of a model and a batch, as the recipe trains with (`label_objective()`).
        ctx: device, threads, progress.

    Raises:
        RunError: a gradient is not finite.
    """
    device = torch_device(ctx.device)
    single = [one for batch in placed_batches(rows, device) for one in _one_by_one(batch)]
    wanted = {id(parameter) for parameter in parameters.values()}
    with threads(ctx.threads):
        frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in wanted]
        for parameter in frozen:  # whose gradients nobody reads
            parameter.requires_grad_(False)
        try:
            found = _summed(model.to(device), single, parameters, objective, ctx)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
            model.zero_grad(set_to_none=True)
            model.to("cpu")
    odd = next((key for key, value in found.items() if not bool(value.isfinite().all())), None)
    if odd is not None:
        raise RunError(
            f"{odd}: its gradient on rows of {rows.origin} is not finite. The training before it has probably"
            " gone astray.",
            code="non-finite-gradients",
        )
    return {key: value.cpu() for key, value in found.items()}


def _one_by_one(batch: TensorBatch) -> list[TensorBatch]:
    """Return the rows of `batch`; a batch of pairs, which are compared, stays one."""
    count = len(batch["labels"])
    if len(batch.get("input_ids", batch["labels"])) != count:
        return [batch]
    return [{name: value[at : at + 1] for name, value in batch.items()} for at in range(count)]


def _summed(
    model: Any,
    batches: list[TensorBatch],
    parameters: Mapping[str, Tensor],
    objective: Objective,
    ctx: Context,
) -> dict[str, Tensor]:
    found = {key: torch.zeros_like(p, dtype=torch.float32) for key, p in parameters.items()}
    for done, batch in enumerate(batches, start=1):
        model.zero_grad(set_to_none=True)
        total_of(objective(model, batch)).backward()
        for key, parameter in parameters.items():
            if parameter.grad is not None:
                found[key].addcmul_(parameter.grad, parameter.grad, value=1 / len(batches))
        ctx.progress(done, len(batches), "gradients")
    return found
