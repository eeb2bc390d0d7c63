"""Latency of a run's artifacts, kept in the store by artifact, baseline, texts, settings and machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact
from smelt.core.data import IMAGES, Split
from smelt.core.files import hash_of
from smelt.core.messages import as_json
from smelt.core.stage import Progress
from smelt.core.store.store import Store
from smelt.execute.scoring import library_versions
from smelt.look.machine import device_of

if TYPE_CHECKING:
    from smelt.evaluate.latency import Latency, LatencySettings

# What the time from text to text depends on, besides smelt itself.
_LIBRARIES = (
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
    "onnxruntime-ep-nv-tensorrt-rtx",
    "openvino",
)

# What reads the rows of a task besides.
_DECODERS: dict[str, tuple[str, ...]] = {IMAGES: ("pillow",)}

Measured = Mapping[str, dict[str, Any]]


class LatencyScores:
    """Measures what the store does not know yet, and only that."""

    def __init__(self, store: Store, recipe: Any, split: Split) -> None:
        self.store, self.recipe, self.split = store, recipe, split

    def measure(
        self,
        artifacts: Mapping[str, Artifact],
        baseline: str,
        progress: Progress,
        fresh: bool = False,
        known_alone: Set[str] = frozenset(),
        told: Callable[[Measured], None] = lambda measured: None,
        seconds: float | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Return, by step name, `{"rows": [...], "peak_memory_bytes": n, "error": None or a message}`.

        What was timed is kept as soon as an artifact is through, so a run that is stopped loses only the
        artifact under way. Times that were disturbed are kept for nobody: the next run takes them anew.

        Args:
            artifacts: by step name.
            baseline: the step that the others are compared with.
            progress: told of every pair of rounds.
            fresh: take all times anew.
            known_alone: steps that are not timed now; what the store knows of them is returned.
            told: called with what is known, at first and after each artifact.
            seconds: what it may take, where the recipe does not say it; None: as long as it needs.
        """
        from smelt.evaluate.latency import measure

        keys = {name: self._key(artifact, artifacts[baseline]) for name, artifact in artifacts.items()}
        known = {n: v for n, key in keys.items() if (v := self.store.read_score(key))}
        kept = {n: v for n, v in known.items() if not fresh or n in known_alone}
        missing = [name for name in artifacts if name not in kept and name not in known_alone]
        told(kept)
        if not missing:
            return kept
        score = self.recipe.score

        def keep(result: Latency, name: str) -> None:
            for each in (name, baseline):  # the baseline's rounds lie beside each artifact's
                if each in missing and (each in result.rows or each in result.errors):
                    kept[each] = _value(artifacts[each], result, each)
                    if _is_good(kept[each], score.latency.rounds, result.cut):
                        self.store.write_score(keys[each], kept[each])
            told(kept)

        with timed_rows(self.split, score.latency) as (split, arrays):
            result = measure(
                {name: artifacts[name].path for name in {baseline: None, **dict.fromkeys(missing)}},
                baseline,
                [e.text for e in split.examples],
                score.latency,
                self.recipe.task,
                generation=score.generation,
                progress=progress,
                pairs=[e.text_pair for e in split.examples],
                device=self.recipe.device,
                counts=_counts(kept),
                told=keep,
                arrays=arrays,
                seconds=seconds if score.latency.max_minutes is None else 60 * score.latency.max_minutes,
            )
        for name in missing:
            keep(result, name)
        return kept

    def _key(self, artifact: Artifact, baseline: Artifact) -> str:
        from smelt.evaluate.environment import machine_id
        from smelt.evaluate.latency import VERSION

        return hash_of(
            {
                "kind": "latency",
                "version": VERSION,
                "artifact": artifact.key,
                "baseline": baseline.key,
                "data": self.split.fingerprint,
                "settings": self.recipe.score.latency.key(),
                "generation": self.recipe.score.generation.model_dump(),
                "machine": machine_id(),
                "device": [device_of(a, self.recipe.device) for a in (artifact, baseline)],
                "libraries": library_versions((*_LIBRARIES, *_DECODERS.get(self.recipe.task, ()))),
            }
        )


@contextlib.contextmanager
def timed_rows(split: Split, settings: LatencySettings) -> Iterator[tuple[Split, Path | None]]:
    """Yield the rows to be timed and, where they are arrays, a file of them for the processes that time.

    Of arrays no more rows than are used: they are of one shape, so one is as long as the other.
    """
    if split.arrays is None:
        yield split, None
        return
    from smelt.core.rows.arrays import write_arrays

    some = split.head(max(settings.texts, *settings.batch_sizes))
    assert some.arrays is not None
    with TemporaryDirectory(prefix="smelt-") as folder:
        path = Path(folder, "rows.npz")
        write_arrays(path, some.arrays.values)
        yield some, path


def _value(artifact: Artifact, result: Latency, name: str) -> dict[str, Any]:
    error = result.errors.get(name)
    return {
        "artifact": artifact.key,
        "rows": result.rows.get(name, []),
        "peak_memory_bytes": result.peak_memory_bytes.get(name),
        "error": error and as_json([error])[0],
    }


def _is_good(value: Mapping[str, Any], rounds: int, cut: bool) -> bool:
    """Say whether a later run may take these times for its own, however long it may take.

    Args:
        value: of an artifact.
        rounds: that the recipe asks for.
        cut: whether fewer texts were used for lack of time.
    """
    return (
        value["error"] is None
        and not cut
        and all(
            row["stable"] and sum(one["counted"] for one in row["rounds"]) >= rounds for row in value["rows"]
        )
    )


def _counts(kept: Measured) -> dict[int, int]:
    """Return how many texts earlier times were taken on, by batch size, so that all are of the same."""
    return {row["batch_size"]: row["texts"] for value in kept.values() for row in value["rows"]}
