"""Compare the layers of a run's torch steps with the baseline's; results are stored and reused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smelt.core.artifact import Artifact
from smelt.core.files import json_hash
from smelt.core.stage import Progress
from smelt.core.store import Store
from smelt.data.splits import Split
from smelt.models.families.family import STACK_NAMES
from smelt.pipeline.execute.scoring import library_versions

# Receives the name of a step and its `layer_sqnr` of report.json.
OnCompared = Callable[[str, Mapping[str, Any]], None]


class LayerScores:
    """Compares layers that were not compared yet.

    split: the samples, of which `count` are used.
    """

    def __init__(self, store: Store, recipe: Any, split: Split, count: int) -> None:
        self.store, self.recipe, self.split, self.count = store, recipe, split, count

    def compare(
        self,
        artifacts: Mapping[str, Artifact],
        parents: Mapping[str, str | None],
        baseline: str,
        progress: Progress,
        on_compared: OnCompared,
    ) -> None:
        """Compare each torch artifact with the baseline's.

        Args:
            artifacts: artifacts by step name.
            parents: the step that each step continues from.
            baseline: name of the baseline.
            progress: called after each step.
            on_compared: called with the result of each step.
        """
        base = artifacts.get(baseline)
        if base is None or base.format != "torch":
            return
        steps = [n for n, a in artifacts.items() if a.format == "torch" and a.key != base.key]
        keys = {name: self._key(base, artifacts[name]) for name in steps}
        stored = {name: found for name in steps if (found := self.store.read_score(keys[name]))}
        for name, found in stored.items():
            on_compared(name, found["layer_sqnr"])
        if missing := [name for name in steps if name not in stored]:
            self._compare_new(artifacts, parents, baseline, missing, keys, progress, on_compared)

    def _compare_new(
        self,
        artifacts: Mapping[str, Artifact],
        parents: Mapping[str, str | None],
        baseline: str,
        missing: Sequence[str],
        keys: Mapping[str, str],
        progress: Progress,
        on_compared: OnCompared,
    ) -> None:
        from smelt.evaluate.layer_sqnr import LayerComparison, NotComparableError, SampleSource, not_compared
        from smelt.training.training_state import torch_threads

        source = SampleSource(self.split, self.recipe.task, self.count, self.recipe.seed)
        with torch_threads(self.recipe.threads):
            try:
                comparison = LayerComparison(artifacts[baseline], source, self.recipe.device)
            except NotComparableError as error:
                for name in missing:
                    on_compared(name, not_compared(str(error)))
                return
            for done, name in enumerate(missing, 1):
                kept = kept_blocks(name, baseline, parents, artifacts)
                found = comparison.compare(artifacts[name], kept)
                value = {"artifact": artifacts[name].key, "layer_sqnr": found}
                self.store.write_score(keys[name], value)
                on_compared(name, found)
                progress(done, len(missing), name)

    def _key(self, base: Artifact, step: Artifact) -> str:
        from smelt.evaluate.layer_sqnr import SQNR_VERSION

        return json_hash(
            {
                "kind": "layer-sqnr",
                "version": SQNR_VERSION,
                "artifacts": [base.key, step.key],
                "data": self.split.fingerprint,
                "count": self.count,
                "seed": self.recipe.seed,
                "device": self.recipe.device,
                "libraries": library_versions(("torch", "transformers", "tokenizers")),
            }
        )


def kept_blocks(
    name: str, baseline: str, parents: Mapping[str, str | None], artifacts: Mapping[str, Artifact]
) -> dict[str, list[int]]:
    """Return, by stack, the blocks of the baseline that a step has; only stacks that lost some.

    Empty if the step does not continue from the baseline.
    """
    chain: list[str] = []
    at: str | None = name
    while at is not None and at != baseline:
        chain.append(at)
        at = parents.get(at)
    found: dict[str, list[int]] = {}
    for step in reversed(chain if at == baseline else []):
        details = artifacts[step].manifest.details if step in artifacts else {}
        shortened = {stack: kept for stack in STACK_NAMES if (kept := details.get(f"kept_{stack}"))}
        if isinstance(dropped := shortened.get("layers"), Mapping):  # of drop-layers, all stacks
            shortened = dict(dropped)
        for stack, kept in shortened.items():
            before = found.get(stack)
            found[stack] = [before[i] for i in kept] if before and max(kept) < len(before) else list(kept)
    return found
