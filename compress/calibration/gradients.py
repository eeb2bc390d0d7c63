"""Squared gradients of parameters on labelled samples (the empirical Fisher information).

The diagonal of the empirical Fisher matrix is the mean over samples of the squared gradient of each sample's
loss (Hsu et al. 2022, FWSVD, arXiv:2207.00112, equation 4, where it weights the rows of a matrix). The
gradient of a batch is a mean over samples, and its square is smaller, so samples are processed one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from smelt.compress.calibration.samples import CalibrationSamples
from smelt.compress.calibration.statistics import batches_on_device
from smelt.compress.train.encoded_samples import TensorBatch
from smelt.compress.train.loss_terms import Objective, total_loss
from smelt.compress.train.training_state import torch_threads
from smelt.core.errors import RunError
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device


def squared_gradients(
    model: Any,
    samples: CalibrationSamples,
    parameters: Mapping[str, Tensor],
    objective: Objective,
    ctx: Context,
) -> dict[str, Tensor]:
    """Return the mean over samples of the squared gradient of the loss, float32 in the parameter's shape.

    For a sentence embedder, whose loss compares pairs, it is the mean over batches.

    Args:
        model: float32, in eval mode, on the CPU; it computes on `ctx.device` inside, and has no gradients
            afterwards.
        samples: with labels (`load_calibration_samples(..., labels=True)`).
        parameters: of the model, by any key.
        objective: the training loss of a model and a batch (`label_objective()`).
        ctx: device, threads, progress.

    Raises:
        RunError: a gradient is not finite.
    """
    device = torch_device(ctx.device)
    single = [one for batch in batches_on_device(samples, device) for one in _split_batch(batch)]
    wanted = {id(parameter) for parameter in parameters.values()}
    with torch_threads(ctx.threads):
        frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in wanted]
        for parameter in frozen:  # whose gradients are not needed
            parameter.requires_grad_(False)
        try:
            found = _sum_squared_gradients(model.to(device), single, parameters, objective, ctx)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
            model.zero_grad(set_to_none=True)
            model.to("cpu")
    odd = next((key for key, value in found.items() if not bool(value.isfinite().all())), None)
    if odd is not None:
        raise RunError(
            f"{odd}: the gradient on samples of {samples.origin} is not finite. The training before"
            " this step has probably diverged; lower its learning_rate.",
            code="non-finite-gradients",
        )
    return {key: value.cpu() for key, value in found.items()}


def _split_batch(batch: TensorBatch) -> list[TensorBatch]:
    """Return the samples of `batch` as single batches; a batch of pairs is not split."""
    count = len(batch["labels"])
    if len(batch.get("input_ids", batch["labels"])) != count:
        return [batch]
    return [{name: value[at : at + 1] for name, value in batch.items()} for at in range(count)]


def _sum_squared_gradients(
    model: Any,
    batches: list[TensorBatch],
    parameters: Mapping[str, Tensor],
    objective: Objective,
    ctx: Context,
) -> dict[str, Tensor]:
    found = {key: torch.zeros_like(p, dtype=torch.float32) for key, p in parameters.items()}
    for done, batch in enumerate(batches, start=1):
        model.zero_grad(set_to_none=True)
        total_loss(objective(model, batch)).backward()
        for key, parameter in parameters.items():
            if parameter.grad is not None:
                found[key].addcmul_(parameter.grad, parameter.grad, value=1 / len(batches))
        ctx.progress(done, len(batches), "gradients")
    return found
