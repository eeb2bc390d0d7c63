"""What the scores of all kinds of output share: settings, custom metrics, comparison with a reference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from smelt.core.artifact import Artifact
from smelt.core.files import json_hash
from smelt.core.store import Store
from smelt.data.splits import Split
from smelt.data.tasks import Task, task_traits
from smelt.evaluate.metrics.metric import MetricSettingValues
from smelt.evaluate.metrics.registry import AGREEMENT_METRIC, is_custom_metric, is_lower_better
from smelt.generation.config import GenerationSettings
from smelt.stage import Progress, no_progress

if TYPE_CHECKING:
    from smelt.evaluate.quality import MetricScore


@dataclass(frozen=True)
class BaseScorer(ABC):
    """The metrics, generation settings and batch size that artifacts are scored with.

    metric_settings: settings of metrics by metric, as in the recipe.
    base: the folder that paths in them are relative to, and where a user's custom metrics are found.
    reference: the artifact that outputs are compared with (`agreement`, and all metrics of `custom`); None if
        not available yet, then `agreement` is not computed.
    reference_cache: outputs of the reference by split.
    """

    store: Store
    task: Task
    metrics: Sequence[str]
    generation: GenerationSettings
    batch_size: int
    threads: int | None
    truncation: Literal["warn", "error"] = "warn"
    device: str = "auto"
    metric_settings: MetricSettingValues = field(default_factory=dict)
    base: Path = Path()
    reference: Artifact | None = None
    reference_cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def needs_reference(self) -> bool:
        """Whether a score also depends on the reference."""
        return task_traits(self.task).modality == "arrays" or AGREEMENT_METRIC in self.metrics

    @abstractmethod
    def score(self, artifact: Artifact, split: Split, progress: Progress = no_progress) -> dict[str, Any]:
        """Return the score of an artifact, as `Scorer.score`."""

    def custom_scores(
        self,
        predictions: Sequence[Any],
        references: Sequence[Any],
        sources: Sequence[Any],
        split: Split,
        examples: str | None = None,
    ) -> dict[str, MetricScore]:
        """Return the scores by the user's custom metrics (see `smelt.evaluate.custom_metric`)."""
        from smelt.evaluate.custom_metric import load_custom_metric, score_custom_metric

        locations = [
            f"{split.origin}:{e.line or e.row or number}" for number, e in enumerate(split.examples, 1)
        ]
        return {
            name: score_custom_metric(
                load_custom_metric(name, self.base),
                predictions,
                references,
                sources,
                locations,
                not is_lower_better(name, self.metric_settings),
                examples,
            )
            for name in self.metrics
            if is_custom_metric(name)
        }

    def agreement_score(
        self, runner: Any, outputs: list[Any], split: Split, progress: Progress
    ) -> dict[str, MetricScore]:
        """Return the score `agreement` of texts or classes; empty if it is not a metric, or no reference."""
        if AGREEMENT_METRIC not in self.metrics or self.reference is None:
            return {}
        from smelt.evaluate.quality import score_agreement

        key = json_hash([self.reference.key, split.fingerprint])
        if self.reference.path == runner.folder:
            self.reference_cache[key] = outputs
        elif key not in self.reference_cache:
            self.reference_cache[key] = self.score(self.reference, split, progress)["predictions"]
        classes = task_traits(self.task).output == "labels"
        inputs = [[text, e.text_pair] for text, e in zip(split.row_contents, split.examples, strict=True)]
        expected = self.reference_cache[key]
        return {AGREEMENT_METRIC: score_agreement(outputs, expected, classes, self.reference.key, inputs)}


def split_scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Split scores into `quality` for the report and `statistics` for paired tests."""
    return {
        "quality": {name: score.to_report() for name, score in scores.items()},
        "statistics": {name: score.statistics.dump() for name, score in scores.items()},
    }
