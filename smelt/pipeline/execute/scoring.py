"""Score artifacts; scores are stored and reused. How each kind of output is scored is in `scores/`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import json_hash
from smelt.core.messages import Message, messages_to_json, warning, with_count
from smelt.core.process_group import from_first, process_rank
from smelt.core.system import package_versions
from smelt.data.splits import Split
from smelt.data.tasks import task_traits
from smelt.evaluate.metrics.registry import (
    find_metric,
    is_custom_metric,
    is_lower_better,
)
from smelt.pipeline.execute.scores.base_scorer import BaseScorer
from smelt.pipeline.inspect.machine import artifact_device
from smelt.runtimes.device import NO_PROVIDER, cuda_device_count
from smelt.runtimes.registry import find_runtime
from smelt.stage import Progress, no_progress
from smelt.tasks.registry import task_spec

# Increased whenever the same artifact and data would give another score or other statistics.
SCORE_VERSION = 15
# A module for each kind of output, imported when one is scored.
_SCORES_PACKAGE = "smelt.pipeline.execute.scores"


@dataclass(frozen=True)
class Scorer(BaseScorer):
    """Scores artifacts, and stores the scores."""

    @property
    def negated_metrics(self) -> frozenset[str]:
        """The scored metrics whose lower values are better."""
        return frozenset(name for name in self.metrics if is_lower_better(name, self.metric_settings))

    def score(self, artifact: Artifact, split: Split, progress: Progress = no_progress) -> dict[str, Any]:
        """Return `{"quality": {metric: score}, "statistics": ..., "warnings": [...], ...}`.

        `statistics` are per example, for paired comparisons of artifacts; `predictions` the outputs per
        example. Classifiers also have `labels`, the class names, and `logits` (see
        `smelt.evaluate.step_agreement.pack_logits`).

        Raises:
            InputError: texts are too long with truncation: error, or a label is unknown.
            RunError: outputs are NaN or infinite (`non-finite-outputs`).
        """
        from smelt.runtimes.registry import open_runner

        # several processes that score together decide alike
        cached = from_first(lambda: self.cached_score(artifact, split))
        if cached is not None:
            return cached
        with open_runner(artifact, self.threads, self.device) as runner:
            too_long = task_spec(self.task).count_truncated(runner, split.examples, self.generation)
            if too_long and self.truncation == "error":
                raise InputError(
                    f"{split.origin}: {with_count(too_long, 'text')} longer than the model's limit. Shorten"
                    " them, or set truncation: warn.",
                    code="texts-too-long",
                )
            output = task_traits(self.task).output.replace("-", "_")
            score_split = import_module(f"{_SCORES_PACKAGE}.{output}").score_split
            value: dict[str, Any] = score_split(self, runner, split, progress)
            value["runner"] = f"{runner.name} {runner.version}"
            value["device"] = runner.device
            value["artifact"] = artifact.key
            for scored in value["quality"].values():
                scored["signature"] += f"|device:{runner.device}"
        warnings: list[Message] = [*value.get("warnings", ()), *_device_warnings(artifact, value["device"])]
        if too_long:
            verb = "was" if too_long == 1 else "were"
            text = (
                f"{too_long} of {len(split)} texts {verb} longer than the model's limit and {verb} truncated."
            )
            warnings.insert(0, warning("truncated-texts", text))
        value["warnings"] = messages_to_json(warnings)
        if process_rank() == 0:
            self.store.write_score(self._key(artifact, split), value)
        return value

    def cached_score(self, artifact: Artifact, split: Split) -> dict[str, Any] | None:
        """Return the stored score of the same artifact, samples and settings; None if there is none."""
        stored = self.store.read_score(self._key(artifact, split))
        if stored is None:
            return None
        # in the recipe's order: the first metric is the main one
        quality = {name: stored["quality"][name] for name in self.metrics if name in stored["quality"]}
        return {**stored, "quality": quality}

    def key_conditions(self) -> dict[str, Any]:
        """Return what a score depends on, apart from artifact, samples and runtime, as JSON values."""
        return {
            "version": SCORE_VERSION,
            "generation": self.generation.model_dump() if task_traits(self.task).output == "text" else None,
            "batch_size": self.batch_size,
            "metric_settings": {name: dict(settings) for name, settings in self.metric_settings.items()},
            "metric_files": self._metric_files,
            "truncation": self.truncation,
            "libraries": package_versions(self._metric_libraries),
        }

    @property
    def _metric_libraries(self) -> tuple[str, ...]:
        libraries = {library for name in self.metrics for library in find_metric(name).libraries}
        return tuple(sorted(libraries))

    @cached_property
    def _metric_files(self) -> dict[str, str]:
        """The fingerprints of metrics that depend on files: a user's module, the model of BERTScore."""
        from smelt.evaluate.custom_metric import load_custom_metric

        fingerprints: dict[str, str | None] = {}
        for name in self.metrics:
            if is_custom_metric(name):
                fingerprints[name] = load_custom_metric(name, self.base).source_hash
            else:
                fingerprints[name] = find_metric(name).fingerprint(
                    self.metric_settings.get(name, {}), self.base
                )
        return {name: value for name, value in fingerprints.items() if value is not None}

    def _key(self, artifact: Artifact, split: Split) -> str:
        runtime = find_runtime(artifact.format, artifact.manifest.details.get("target"))
        libraries = package_versions((*runtime.libraries, *self._metric_libraries))
        reference_part = {"reference": self.reference and self.reference.key} if self.needs_reference else {}
        return json_hash(
            self.key_conditions()
            | {
                "kind": "quality",
                "artifact": artifact.key,
                "data": split.fingerprint,
                "metrics": sorted(self.metrics),
                "device": artifact_device(artifact, self.device),
                "libraries": libraries,
                **reference_part,
            }
        )


def _device_warnings(artifact: Artifact, device: str) -> list[Message]:
    """Return a warning if a graph was scored on another device than it is for."""
    details = artifact.manifest.details
    target = details.get("target")
    if device == "cpu" and target == "ort-tensorrt":
        return [
            warning(
                "other-device",
                "This graph is for TensorRT but was run on the CPU without it. Scores and latency of its"
                " engines may differ.",
            )
        ]
    if device != "cpu" or target != "ort-cuda":
        return []
    is_fp16 = details.get("dtype") == "fp16"
    effect = ", where ONNX Runtime computes most float16 operators in float32" if is_fp16 else ""
    reason_text = f" ({NO_PROVIDER})" if cuda_device_count() else ""
    return [
        warning(
            "other-device",
            f"This graph is for CUDA but was run on the CPU{effect}. Scores and latency may differ on a"
            f" GPU{reason_text}.",
        )
    ]
