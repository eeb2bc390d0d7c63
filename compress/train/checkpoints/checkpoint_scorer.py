"""Score a checkpoint during training like a finished artifact."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from smelt.compress.candidate import candidate_artifact
from smelt.compress.quantize.qat import as_converted
from smelt.compress.train.settings import TrainingSettings
from smelt.core.artifact import Artifact
from smelt.core.data import Split
from smelt.core.errors import InputError, did_you_mean
from smelt.core.stage import Context
from smelt.runtime.models.checkpoint import save_model
from smelt.runtime.models.structure import Edit


class CheckpointScorer:
    """Scores `model` by the metric `settings.metric_for_best_model` on `split`, through `ctx.score`.

    The model is written as the stage will write it (quantized, weights rounded to their stored dtype) and
    loaded by a runner, so that selection uses the weights that are delivered.
    """

    def __init__(
        self,
        model: Any,
        edits: list[Edit],
        src: Artifact,
        split: Split,
        settings: TrainingSettings,
        ctx: Context,
    ) -> None:
        self.model, self.edits, self.src, self.split = model, edits, src, split
        self.settings, self.ctx = settings, ctx

    def __call__(self) -> float:
        """Return the score by `settings.metric_for_best_model`; higher is better.

        Raises:
            InputError: the recipe does not score the metric.
        """
        scores, metric = self.scores(), self.settings.metric_for_best_model
        if metric not in scores:
            known = ", ".join(scores)
            raise InputError(
                f"metric_for_best_model: this recipe does not score '{metric}'. Scored metrics:"
                f" {known}.{did_you_mean(metric, scores)} Add it to score: {{quality: [...]}}, or"
                " set metric_for_best_model: loss.",
                code="metric-not-scored",
                setting="metric_for_best_model",
            )
        return float(scores[metric])

    def scores(self) -> dict[str, float]:
        """Return the score of each metric that the recipe scores; higher is better."""
        with (
            tempfile.TemporaryDirectory(prefix="score-", dir=self.ctx.out.parent) as space,
            _random_state_preserved(),
        ):
            folder = Path(space)
            with as_converted(self.model):
                save_model(self.model, self.edits, folder, self.src.path, self.settings.dtype)
            return dict(self.ctx.score(candidate_artifact(folder, self.src, self.ctx), self.split))


def _random_state_preserved() -> Any:
    """Return a context that preserves the state of torch's random numbers."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))
