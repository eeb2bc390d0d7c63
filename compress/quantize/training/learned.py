"""The scales of a quantized model while they are learned: which layers share a step, and who trains it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smelt.compress.quantize.through_codes import LatentLinear, latents_of
from smelt.compress.quantize.training.settings import QatSettings
from smelt.compress.quantize.training.steps import RangeStep, Steps
from smelt.compress.train.extension import Extension, Group
from smelt.compress.train.terms import Objective
from smelt.core.errors import InputError
from smelt.core.stage import Context


class LearnedSteps:
    """Learned step sizes (LSQ) of one model while it trains through its codes.

    Args:
        model: with float weights behind its codes; from now on it computes with steps that learn. A phase
            before this one may have begun them.
        settings: the learning rate.
        stage: the stage's word, for messages.

    Raises:
        InputError: the model has no codes, or none whose scales can be learned.
    """

    def __init__(self, model: nn.Module, settings: QatSettings, stage: str) -> None:
        self.settings = settings
        self.steps: dict[int, Steps] = {}
        self.left: dict[str, list[str]] = {}  # by scheme, the layers whose scales follow the weights
        ranges: dict[tuple[str, float], RangeStep] = {}
        for name, latent in latents_of(model):
            matrix = latent.home.matrix
            if matrix.scheme.ends(matrix.decided().grid, matrix.options) is None:
                self.left.setdefault(matrix.scheme.name, []).append(name)
                continue
            steps = self.steps.setdefault(id(matrix), latent.steps or Steps(matrix))
            latent.learn(steps)
            fixed = matrix.scheme.fixed_range(matrix) if isinstance(latent, LatentLinear) else None
            if fixed is not None and steps.range is None:
                # products of one part of a block that read the same states were given the same range
                place = name.rpartition(".")[0], float(fixed[0])
                steps.range = ranges.setdefault(place, RangeStep(*fixed))
        if not self.steps:
            raise InputError(
                f"{stage}: qat: scales: lsq learns the scales of codes, and {self._lack()}",
                code="scales-not-learned" if self.left else "not-quantized",
                setting="qat.scales",
            )
        self.home = nn.ModuleList(self.steps.values())

    def _lack(self) -> str:
        if not self.left:
            return "the model has no codes. Put `quantize` before this step, or leave it out."
        return f"{' and '.join(self.left)} has none to learn. Take another scheme, or leave it out."

    def objective(self, objective: Objective) -> Objective:
        """Return `objective`: the gradients of steps are those of any loss."""
        return objective

    def extension(self) -> Extension:
        """Return the steps, which no weight decay draws back to what they were."""
        group = Group(list(self.home.parameters()), learning_rate=self.settings.learning_rate, weight_decay=0)
        return Extension(modules={"steps": self.home}, groups=[group])

    def settle(self, ctx: Context) -> None:
        """Say in `ctx` how far the scales went; they are stored when the codes are decided."""
        ratios = torch.cat([steps.moved().flatten() for steps in self.steps.values()])
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
                f"qat: scales of {scheme} cannot be learned; {len(names)} layers"
                f" ({names[0]}{' and others' if len(names) > 1 else ''}) compute them from the weights.",
            )
