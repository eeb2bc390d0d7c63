"""Measure the latency of a run's artifacts, and check that no text exceeds the model's limit.

Results are stored by artifact, baseline, texts and machine. Lengths are checked before the first step, for
`truncation: error`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact
from smelt.core.errors import combined_error
from smelt.core.files import json_hash, read_json_object
from smelt.core.messages import error_message, messages_to_json, with_count
from smelt.core.store import Store
from smelt.core.system import package_versions
from smelt.core.workspaces import temporary_workspace
from smelt.data.splits import Split
from smelt.data.tasks import Task, task_traits
from smelt.pipeline.inspect.machine import artifact_device
from smelt.stage import Progress
from smelt.tasks.registry import task_spec

if TYPE_CHECKING:
    from smelt.evaluate.latency import LatencyResults, LatencySettings


# Libraries that affect the latency from text to text.
_LATENCY_LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "sentencepiece",
    "numpy",
    "onnxruntime-gpu",
    "onnxruntime",
    "tensorrt",
    "tensorrt-rtx",
    "tensorrt-cu13",
    "tensorrt-cu12",
    "openvino",
)

MeasuredLatency = Mapping[str, dict[str, Any]]


class LatencyScores:
    """Measures latencies that are not in the store yet."""

    def __init__(self, store: Store, recipe: Any, split: Split) -> None:
        self.store, self.recipe, self.split = store, recipe, split

    def measure(
        self,
        artifacts: Mapping[str, Artifact],
        baseline: str,
        progress: Progress,
        fresh: bool = False,
        known_alone: Set[str] = frozenset(),
        on_measured: Callable[[MeasuredLatency], None] = lambda measured: None,
        seconds: float | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Return the results by step name: `rows`, `peak_memory_bytes`, `gpu_memory_bytes` and `error`.

        Results are stored after each artifact, so that an interrupted run loses only the current one.
        Disturbed measurements are not stored; the next run measures again.

        Args:
            artifacts: artifacts by step name.
            baseline: the step that all others are compared with.
            progress: called after every pair of rounds.
            fresh: measure everything again.
            known_alone: steps that are not measured now; only their stored results are returned.
            on_measured: called with the results so far, at the start and after each artifact.
            seconds: time limit if the recipe sets none; None: no limit.
        """
        from smelt.evaluate.latency import TimingJob, measure_latency

        keys = {name: self._key(artifact, artifacts[baseline]) for name, artifact in artifacts.items()}
        stored_scores = {n: v for n, key in keys.items() if (v := self.store.read_score(key))}
        scores = {n: v for n, v in stored_scores.items() if not fresh or n in known_alone}
        missing = [name for name in artifacts if name not in scores and name not in known_alone]
        on_measured(scores)
        if not missing:
            return scores
        score = self.recipe.score

        def keep(result: LatencyResults, name: str) -> None:
            for step_name in (name, baseline):  # the baseline is measured together with each artifact
                if step_name in missing and (step_name in result.rows or step_name in result.errors):
                    scores[step_name] = _score_entry(artifacts[step_name], result, step_name)
                    if _is_reusable(scores[step_name], score.latency.rounds, result.reduced):
                        self.store.write_score(keys[step_name], scores[step_name])
            on_measured(scores)

        with timing_samples(self.split, score.latency) as (split, arrays):
            job = TimingJob(
                [e.text for e in split.examples],
                self.recipe.task,
                score.latency,
                score.generation,
                pairs=[e.text_pair for e in split.examples],
                device=self.recipe.device,
                text_counts=_text_counts(scores),
                arrays=arrays,
            )
            result = measure_latency(
                {name: artifacts[name].path for name in {baseline: None, **dict.fromkeys(missing)}},
                baseline,
                job,
                progress=progress,
                on_measured=keep,
                seconds=seconds
                if score.latency.time_limit_minutes is None
                else 60 * score.latency.time_limit_minutes,
            )
        for name in missing:
            keep(result, name)
        return scores

    def _key(self, artifact: Artifact, baseline: Artifact) -> str:
        from smelt.evaluate.environment import machine_id
        from smelt.evaluate.latency import LATENCY_VERSION

        return json_hash(
            {
                "kind": "latency",
                "version": LATENCY_VERSION,
                "artifact": artifact.key,
                "baseline": baseline.key,
                "data": self.split.fingerprint,
                "settings": self.recipe.score.latency.cache_key(),
                "generation": self.recipe.score.generation.model_dump(),
                "machine": machine_id(),
                "device": [artifact_device(a, self.recipe.device) for a in (artifact, baseline)],
                "libraries": package_versions(
                    (*_LATENCY_LIBRARIES, *task_spec(self.recipe.task).preprocessing_libraries)
                ),
            }
        )


@contextlib.contextmanager
def timing_samples(split: Split, settings: LatencySettings) -> Iterator[tuple[Split, Path | None]]:
    """Yield the samples to measure and, for arrays, a file with them for the measuring processes.

    Arrays are limited to the number of samples in use: mostly they all have one shape, so none is longer.
    """
    if split.arrays is None:
        yield split, None
        return
    from smelt.data.npz_arrays import write_samples

    samples = split.take(max(settings.texts, *settings.batch_sizes))
    assert samples.arrays is not None
    with temporary_workspace() as folder:
        yield samples, write_samples(folder / "rows.npz", samples.arrays)


def _score_entry(artifact: Artifact, result: LatencyResults, name: str) -> dict[str, Any]:
    error = result.errors.get(name)
    return {
        "artifact": artifact.key,
        "rows": result.rows.get(name, []),
        "peak_memory_bytes": result.peak_memory_bytes.get(name),
        "gpu_memory_bytes": result.gpu_memory_bytes.get(name),
        "error": error and messages_to_json([error])[0],
    }


def _is_reusable(value: Mapping[str, Any], rounds: int, reduced: bool) -> bool:
    """Return whether a later run may reuse these results.

    Args:
        value: results of an artifact.
        rounds: number of rounds set in the recipe.
        reduced: whether fewer texts were used because of the time limit.
    """
    return (
        value["error"] is None
        and not reduced
        and all(
            row["stable"] and sum(timing_round["counted"] for timing_round in row["rounds"]) >= rounds
            for row in value["rows"]
        )
    )


def _text_counts(cached: MeasuredLatency) -> dict[int, int]:
    """Return the number of texts in earlier measurements by batch size, so that new ones use the same."""
    return {row["batch_size"]: row["texts"] for value in cached.values() for row in value["rows"]}


def require_texts_fit(folder: Path, task: Task, splits: Mapping[str, Split]) -> None:
    """Require that no sample of `splits` exceeds the limit of the model in `folder`.

    Language modeling splits text into windows and images are resized, so these tasks are not checked.

    Raises:
        InputError: some texts are too long; the message lists each split with line or row numbers (from 1).
    """
    from smelt.models.checkpoint import load_tokenizer
    from smelt.models.text_rules import max_input_length

    if task_traits(task).samples not in ("texts", "prompts"):
        return
    tokenizer = load_tokenizer(folder)
    limit = max_input_length(tokenizer, read_json_object(folder / "config.json"))
    problems = []
    for name, split in splits.items():
        indices = sorted(task_spec(task).too_long_samples(split, tokenizer, limit))
        if indices:
            lines = [split.examples[index].line for index in indices[:5]]
            row_labels = [str(line or index + 1) for line, index in zip(lines, indices[:5], strict=True)]
            row_list = (
                ("line " if all(lines) else "row ")
                + ", ".join(row_labels)
                + (", ..." if len(indices) > 5 else "")
            )
            amount = f"{with_count(len(indices), 'sample')} {'has' if len(indices) == 1 else 'have'}"
            problems.append(
                error_message(
                    "texts-too-long",
                    f"{split.origin} ({name}): {amount} texts of more than {limit} tokens, the model's limit:"
                    f" {row_list}. Shorten them, or set truncation: warn to truncate them.",
                )
            )
    if problems:
        raise combined_error(problems)
