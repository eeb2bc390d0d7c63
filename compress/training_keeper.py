"""Which weights of a training are kept: the best on validation, else the averaged, else the last.

The best wait in memory, so nothing is written that outlives the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from smelt.core.stage import Progress


class Keeper(transformers.TrainerCallback):  # type: ignore[misc]
    """Reports progress, validates at set steps and keeps the best weights; optionally averages them."""

    def __init__(self, model: nn.Module, ema: float | None, progress: Progress) -> None:
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.evaluate: Callable[[], float] | None = None
        self.evals, self.ema, self.progress = 0, ema, progress
        self.average: dict[str, Tensor] = {}
        self.best: dict[str, Tensor] = {}
        self.best_loss, self.best_step = math.inf, 0
        self.recent: deque[float] = deque(maxlen=50)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Average, report, and at the set steps validate."""
        step, total = state.global_step, state.max_steps
        if self.ema is not None:
            self._update_average(step)
        self.progress(step, total, f"loss {sum(self.recent) / max(1, len(self.recent)):.3f}")
        if self.evals and step in {round(total * k / self.evals) for k in range(1, self.evals + 1)}:
            self._validate(step)

    def finish(self) -> None:
        """Put the best weights (else the averaged, else leave the last) into the model."""
        self._put(self.best or self.average)

    def last_good(self) -> str:
        """Say which weights were the last that are known to be good."""
        if not self.best:
            return "No validation had been done before, so no checkpoint of it is known to be good."
        return (
            f"The last good checkpoint was that of step {self.best_step} (validation loss"
            f" {self.best_loss:.3f}); max_steps: {self.best_step} would end there."
        )

    def _validate(self, step: int) -> None:
        assert self.evaluate is not None
        last = self._copy() if self.average else {}
        self._put(self.average)
        loss = self.evaluate()
        if loss < self.best_loss:
            self.best, self.best_loss, self.best_step = self._copy(), loss, step
        self._put(last)

    def _update_average(self, step: int) -> None:
        if not self.average:
            self.average = self._copy()
            return
        decay = min(self.ema or 0.0, (1 + step) / (10 + step))  # the first weights fade quickly
        for name, value in self.parameters.items():
            self.average[name].lerp_(value.detach().to(self.average[name].device), 1 - decay)

    def _copy(self) -> dict[str, Tensor]:
        return {n: p.detach().to("cpu", copy=True) for n, p in self.parameters.items()}

    def _put(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.parameters[name].copy_(value)
