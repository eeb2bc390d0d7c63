"""Select the weights to keep after training: the best on validation, else the averaged, else the last.

The initial weights are a candidate too. The best weights are kept in memory, so no file outlives the run.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from smelt.quantization.schemes.bitsandbytes import silence_bitsandbytes
from smelt.stage import Progress
from smelt.training.extension import TOTAL_LOSS, TrainingExtension
from smelt.training.sharding import local_part

# transformers imports peft with its Trainer, and peft imports bitsandbytes, if they are installed
with silence_bitsandbytes():
    from transformers import TrainerCallback


@dataclass(frozen=True)
class Validation:
    """The result of one validation.

    step: 0 before the first update. score: of `metric_for_best_model`, higher is better. other_metrics: their
    scores, for a warning if the loss selects; higher is better.
    """

    step: int
    loss: float
    score: float | None = None
    other_metrics: Mapping[str, float] = field(default_factory=dict)

    def beats(self, other: Validation | None) -> bool:
        """Return whether this result is better than `other`; ties are decided by the loss."""
        if other is None:
            return not math.isnan(self.loss)
        return self._rank() > other._rank()

    def _rank(self) -> tuple[float, float]:
        return (0.0 if self.score is None else self.score, -self.loss)


def running_statistics(model: nn.Module) -> dict[str, Any]:
    """Return the running means and variances of batch norms by name; they are part of the weights to keep."""
    return {
        f"{name}.{attribute}": getattr(module, attribute)
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        for attribute in ("running_mean", "running_var")
    }


# A training curve has about this many points, so that it can be stored with the artifact.
CURVE_POINTS = 50
LogMetrics: TypeAlias = Callable[[Mapping[str, float], int], None]


def log_training_curve(details: Mapping[str, Any], log_metrics: LogMetrics) -> None:
    """Log the curve in the `details` of a finished training, in the order in which it was logged live."""
    curve = details.get("curve") or {}
    names = [name for name in curve if name != "step"]
    points: list[tuple[int, Mapping[str, float]]] = [
        (step, {name: curve[name][index] for name in names})
        for index, step in enumerate(curve.get("step", ()))
    ]
    points += [
        (validation["step"], {"validation_loss": validation["loss"]})
        for validation in details.get("validations", ())
    ]
    for step, metrics in sorted(points, key=lambda point: point[0]):
        log_metrics(metrics, step)


class CheckpointSelector(TrainerCallback):  # type: ignore[misc]
    """Reports progress, validates at set steps and keeps the best weights; optionally averages them."""

    def __init__(
        self,
        model: nn.Module,
        ema: float | None,
        progress: Progress,
        extension: TrainingExtension | None = None,
        log_metrics: LogMetrics = lambda metrics, step: None,
    ) -> None:
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.parameters |= running_statistics(model)
        self.evaluate: Callable[[], float] | None = None
        self.score: Callable[[], float] | None = None
        self.probe: Callable[[], Mapping[str, float]] | None = None
        self.sign = 1  # of reported scores: -1 if `score` is a negated metric
        self.evals, self.ema, self.progress = 0, ema, progress
        self.patience: int | None = None
        self.stopped_early = False
        self.extension = extension or TrainingExtension()
        self.average: dict[str, Tensor] = {}
        self.best_weights: dict[str, Tensor] = {}
        self.best: Validation | None = None
        self.validations: list[Validation] = []
        self.curve: dict[str, list[float]] = {"step": [], "train_loss": [], "learning_rate": []}
        self._log_metrics = log_metrics
        # of the last batches: mean and number of items of each loss term
        self.recent: deque[Mapping[str, tuple[float, int]]] = deque(maxlen=50)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Validate the initial weights; log the curve before an interruption again."""
        log_training_curve(self._history(), self._log_metrics)
        if self.evals and not self.validations:  # a resumed training has done it
            self._validate(0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Call the technique before the update."""
        self.extension.before_step(state.global_step + 1, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Average, report, and at the set steps validate."""
        step, total = state.global_step, state.max_steps
        self.extension.after_step(step, total)
        if self.ema is not None:
            self._update_average(step)
        self.progress(step, total, f"loss {self.recent_loss():.3f}")
        if step in (1, total) or step % max(1, total // CURVE_POINTS) == 0:
            self._add_to_curve(step, args.gradient_accumulation_steps, kwargs["lr_scheduler"])
        if self.evals and step in {round(total * k / self.evals) for k in range(1, self.evals + 1)}:
            self._validate(step)
            if self._out_of_patience() and step < total:
                self.stopped_early = control.should_training_stop = True

    def _out_of_patience(self) -> bool:
        """Return whether the last `patience` validations were not better than the one before them."""
        if self.patience is None or self.best is None:
            return False
        return sum(validation.step > self.best.step for validation in self.validations) >= self.patience

    def details(self, steps: int) -> dict[str, Any]:
        """Return the details for the report after `steps` updates."""
        details = {
            "train_loss": self.recent_loss(),
            "validation_loss": self.best.loss if self.best else None,
            "kept_step": self.best.step if self.best else steps,
            **({"stopped_early": True} if self.stopped_early else {}),
            **self._history(),
        }
        losses = self.recent_losses()
        return details if set(losses) == {TOTAL_LOSS} else details | {"train_losses": losses}

    def state_dict(self) -> dict[str, Any]:
        """Return the state without weights, as plain values."""
        return {
            "validations": [asdict(validation) for validation in self.validations],
            "best": None if self.best is None else asdict(self.best),
            "curve": self.curve,
            "recent": [{name: list(value) for name, value in batch.items()} for batch in self.recent],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; the best and the averaged weights are restored later."""
        self.validations = [Validation(**entry) for entry in state["validations"]]
        self.best = None if state["best"] is None else Validation(**state["best"])
        self.curve = state["curve"]
        self.recent.extend({n: (mean, items) for n, (mean, items) in b.items()} for b in state["recent"])

    def load_best(self) -> None:
        """Load the best weights (else the averaged, else keep the last) into the model."""
        self._load_weights(self.best_weights or self.average)

    def recent_loss(self) -> float:
        """Return the mean loss over the items of the last batches."""
        return sum(self.recent_losses().values())

    def recent_losses(self, batches: int = 0) -> dict[str, float]:
        """Return the weighted mean of each named loss term in the last batches; their sum is the loss.

        batches: number of batches; 0: all that are known.
        """
        sums: dict[str, tuple[float, int]] = {}
        for batch in list(self.recent)[-batches:]:
            for name, (mean, items) in batch.items():
                total, count = sums.get(name, (0.0, 0))
                sums[name] = total + mean * items, count + items
        return {name: total / max(1, count) for name, (total, count) in sums.items()}

    def last_good_text(self) -> str:
        """Return a sentence about the last good weights, for an error message."""
        if self.best is None:
            return "No validation had run before, so no checkpoint is known to be good."
        if self.best.step == 0:
            return (
                f"No checkpoint was better than the initial weights (validation loss {self.best.loss:.3f})."
            )
        return (
            f"The last good checkpoint was at step {self.best.step} (validation loss"
            f" {self.best.loss:.3f}); max_steps: {self.best.step} stops there."
        )

    def validation_history(self) -> list[dict[str, Any]]:
        """Return every validation as plain values, for the report."""
        entries = [
            {k: v for k, v in asdict(validation).items() if v not in (None, {})}
            for validation in self.validations
        ]
        return [p | {"score": self.sign * p["score"]} if "score" in p else p for p in entries]

    def no_improvement_text(self, select: str) -> str | None:
        """Return a warning if the initial weights are the best, else None."""
        later_validations = [validation for validation in self.validations if validation.step]
        if self.best is None or self.best.step or not later_validations:
            return None
        best = max(later_validations, key=Validation._rank)
        metric, before, after = "loss", self.best.loss, best.loss
        if self.best.score is not None and best.score is not None and self.best.score != best.score:
            metric, before, after = select, self.sign * self.best.score, self.sign * best.score
        return (
            f"Training did not improve the model: the validation {metric} was {before:.4g} before and at best"
            f" {after:.4g} after it (step {best.step}). The weights from before training are kept. Lower"
            " learning_rate, or add training samples or steps."
        )

    def worse_than_random_text(self) -> str | None:
        """Return a warning if initial weights, which cannot be kept, had a lower loss; else None."""
        first = self.validations[0] if self.validations else None
        if first is None or first.step or self.extension.may_be_best(0) or self.best is None:
            return None
        if self.best.loss <= first.loss:
            return None
        return (
            f"The validation loss of the kept weights, {self.best.loss:.4g} (step {self.best.step}), is above"
            f" that before the training, {first.loss:.4g}. Lower learning_rate, or add training"
            " samples or steps."
        )

    def _history(self) -> dict[str, Any]:
        return {"validations": self.validation_history(), "curve": self.curve}

    def _add_to_curve(self, step: int, batches_per_update: int, schedule: Any) -> None:
        """Add the mean loss since the last point, and the learning rate."""
        updates = step - int(self.curve["step"][-1] if self.curve["step"] else 0)
        loss = sum(self.recent_losses(updates * batches_per_update).values())
        curve_point = {"train_loss": float(f"{loss:.5g}"), "learning_rate": float(schedule.get_last_lr()[0])}
        for name, value in {"step": step, **curve_point}.items():
            self.curve[name].append(value)
        self._log_metrics(curve_point, step)

    def _validate(self, step: int) -> None:
        assert self.evaluate is not None
        last = self._copy_weights() if self.average else {}
        self._load_weights(self.average)
        with contextlib.nullcontext() if step else self.extension.as_incoming():
            score = self.score() if self.score else None
            validation = Validation(step, self.evaluate(), score, self.probe() if self.probe else {})
        self.validations.append(validation)
        self._log_metrics({"validation_loss": validation.loss}, step)
        if self.extension.may_be_best(step) and validation.beats(self.best):
            self.best_weights, self.best = self._copy_weights(), validation
        self._load_weights(last)

    def _update_average(self, step: int) -> None:
        if not self.average:
            self.average = self._copy_weights()
            return
        decay = min(self.ema or 0.0, (1 + step) / (10 + step))  # the first weights decay quickly
        for name, value in self.parameters.items():
            self.average[name].lerp_(local_part(value).detach().to(self.average[name].device), 1 - decay)

    def _copy_weights(self) -> dict[str, Tensor]:
        return {n: local_part(p).detach().to("cpu", copy=True) for n, p in self.parameters.items()}

    def _load_weights(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                local_part(self.parameters[name]).copy_(value)
