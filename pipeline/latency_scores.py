"""Latency of a run's artifacts, kept in the store by artifact, baseline, texts, settings and machine."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from smelt.core.artifact import Artifact
from smelt.core.data import Split
from smelt.core.files import hash_of
from smelt.core.stage import Progress
from smelt.core.store import Store
from smelt.machine import device_of
from smelt.scoring import library_versions


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
    ) -> dict[str, dict[str, Any]]:
        """Return, by step name, `{"rows": [...], "peak_memory_bytes": n, "error": None or text}`.

        known_alone: steps that are not timed now; what the store knows of them is returned.
        """
        from smelt.evaluate.latency import measure

        keys = {name: self._key(artifact, artifacts[baseline]) for name, artifact in artifacts.items()}
        anew = keys.keys() - known_alone if fresh else set()
        kept = {name: None if name in anew else self.store.read_score(key) for name, key in keys.items()}
        missing = [name for name, value in kept.items() if value is None and name not in known_alone]
        if missing:
            wanted = {name: artifacts[name].path for name in {baseline: None, **dict.fromkeys(missing)}}
            score = self.recipe.score
            result = measure(
                wanted,
                baseline,
                [e.text for e in self.split.examples],
                score.latency,
                self.recipe.task,
                generation=score.generation,
                progress=progress,
                pairs=[e.text_pair for e in self.split.examples],
                device=self.recipe.device,
            )
            for name in missing:
                kept[name] = {
                    "artifact": artifacts[name].key,
                    "rows": result.rows.get(name, []),
                    "peak_memory_bytes": result.peak_memory_bytes.get(name),
                    "error": result.errors.get(name),
                }
                if not result.errors.get(name):
                    self.store.write_score(keys[name], kept[name] or {})
        return {name: value for name, value in kept.items() if value is not None}

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
                "settings": self.recipe.score.latency.model_dump(mode="json"),
                "generation": self.recipe.score.generation.model_dump(),
                "machine": machine_id(),
                "device": [device_of(a, self.recipe.device) for a in (artifact, baseline)],
                "libraries": library_versions(("torch", "transformers", "onnxruntime-gpu", "onnxruntime")),
            }
        )
