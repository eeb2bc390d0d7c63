"""Training of the step sizes (scales) of a quantized model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smelt.compress.quantize.qat import QatLinear, qat_layers
from smelt.compress.quantize.training.settings import QatSettings
from smelt.compress.quantize.training.step_sizes import ActivationStepSize, StepSizes
from smelt.compress.train.extension import ParameterGroup, TrainingExtension
from smelt.compress.train.loss_terms import Objective
from smelt.core.errors import InputError
from smelt.core.stage import Context


class StepSizeTraining:
    """Learned step sizes (LSQ) of a model during quantization-aware training.

    Args:
        model: prepared by `prepare_qat`; it computes with the learned steps from now on, including steps of
        an
            earlier phase.
        settings: settings with the learning rate.
        stage: the name of the stage, for messages.

    Raises:
        InputError: the model is not quantized, or no scales can be learned.
    """

    def __init__(self, model: nn.Module, settings: QatSettings, stage: str) -> None:
        self.settings = settings
        self.steps: dict[int, StepSizes] = {}
        self.left: dict[str, list[str]] = {}  # by scheme, the layers with computed scales
        ranges: dict[tuple[str, float], ActivationStepSize] = {}
        for name, latent in qat_layers(model):
            matrix = latent.quantized.matrix
            if matrix.scheme.code_range(matrix.unpack().qparams, matrix.options) is None:
                self.left.setdefault(matrix.scheme.name, []).append(name)
                continue
            steps = self.steps.setdefault(id(matrix), latent.step_sizes or StepSizes(matrix))
            latent.learn_step_sizes(steps)
            fixed = matrix.scheme.static_activation_range(matrix) if isinstance(latent, QatLinear) else None
            if fixed is not None and steps.range is None:
                # linear layers with the same inputs have the same range
                place = name.rpartition(".")[0], float(fixed[0])
                steps.range = ranges.setdefault(place, ActivationStepSize(*fixed))
        if not self.steps:
            raise InputError(
                f"{stage}: qat: scales: lsq trains the scales of quantized weights, and"
                f" {self._no_steps_reason()}",
                code="scales-not-learned" if self.left else "not-quantized",
                setting="qat.scales",
            )
        self.home = nn.ModuleList(self.steps.values())

    def _no_steps_reason(self) -> str:
        if not self.left:
            return "the model is not quantized. Put `quantize` before this step, or remove scales: lsq."
        names = " and ".join(self.left)
        return f"{names} has no trainable scales. Use another scheme, or remove scales: lsq."

    def objective(self, objective: Objective) -> Objective:
        """Return `objective` unchanged; steps need no extra loss."""
        return objective

    def extension(self) -> TrainingExtension:
        """Return the training extension with the steps, without weight decay."""
        group = ParameterGroup(
            list(self.home.parameters()), learning_rate=self.settings.learning_rate, weight_decay=0
        )
        return TrainingExtension(modules={"steps": self.home}, groups=[group])

    def finalize(self, ctx: Context) -> None:
        """Report the changes of the scales to `ctx`; they are stored by `convert_qat`."""
        ratios = torch.cat([steps.scale_changes().flatten() for steps in self.steps.values()])
        ranges = {id(steps.range): steps.range for steps in self.steps.values() if steps.range is not None}
        details: dict[str, Any] = {
            "matrices": len(self.steps),
            "scales": ratios.numel(),
            "mean_ratio": round(float(ratios.mean()), 4),
            "mean_change": round(float(ratios.log().abs().mean()), 4),
        }
        if ranges:
            details["ranges"] = len(ranges)
        ctx.details["learned_scales"] = details
        for scheme, names in self.left.items():
            ctx.warn(
                "scales-not-learned",
                f"qat: scales of {scheme} cannot be learned; the scales of {len(names)} layers"
                f" ({names[0]}{' and others' if len(names) > 1 else ''}) are computed from the weights.",
            )
