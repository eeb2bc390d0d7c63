"""Compare the steps of a run with the baseline: layers, next tokens. Results are stored and reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from smelt.core.artifact import Artifact
from smelt.core.files import json_hash
from smelt.core.store import Store
from smelt.core.system import package_versions
from smelt.data.splits import Split
from smelt.models.families.family import STACK_NAMES
from smelt.pipeline.inspect.machine import artifact_device
from smelt.runtimes.registry import find_runtime, open_runner
from smelt.stage import Progress

# Receives the name of a step and the values of report.json.
OnCompared = Callable[[str, Mapping[str, Any]], None]


class BaselineComparison(Protocol):
    """One kind of comparison. kind: its name, also the key of a stored result."""

    kind: ClassVar[str]

    @property
    def recipe(self) -> Any:
        """The recipe of the run."""

    @property
    def split(self) -> Split:
        """The samples."""

    @property
    def count(self) -> int:
        """How many of the samples are used."""

    def is_compared(self, artifact: Artifact) -> bool:
        """Return whether an artifact can be compared."""

    def results(
        self, artifacts: Mapping[str, Artifact], baseline: str, missing: Sequence[str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and the result of each step of `missing`."""

    def conditions(self, base: Artifact, step: Artifact) -> dict[str, Any]:
        """Return what a result depends on, apart from artifacts, samples and seed, as JSON values."""


def compare_with_baseline(
    comparison: BaselineComparison,
    store: Store,
    artifacts: Mapping[str, Artifact],
    baseline: str,
    progress: Progress,
    on_compared: OnCompared,
) -> None:
    """Compare each artifact of `artifacts`, by step name, with that of the step `baseline`.

    progress: called after each step that was not compared yet. on_compared: called with the result of each.
    """
    baseline_artifact = artifacts.get(baseline)
    if baseline_artifact is None or not comparison.is_compared(baseline_artifact):
        return
    kind = comparison.kind
    steps = [n for n, a in artifacts.items() if comparison.is_compared(a) and a.key != baseline_artifact.key]
    keys = {name: _result_key(comparison, baseline_artifact, artifacts[name]) for name in steps}
    stored = {name: score for name in steps if (score := store.read_score(keys[name]))}
    for name, score in stored.items():
        on_compared(name, score[kind])
    missing_names = [name for name in steps if name not in stored]
    for count, (name, result) in enumerate(comparison.results(artifacts, baseline, missing_names), 1):
        store.write_score(keys[name], {"artifact": artifacts[name].key, kind: result})
        on_compared(name, result)
        progress(count, len(missing_names), name)


def _result_key(comparison: BaselineComparison, base: Artifact, step: Artifact) -> str:
    return json_hash(
        {
            "kind": comparison.kind,
            "artifacts": [base.key, step.key],
            "data": comparison.split.fingerprint,
            "count": comparison.count,
            "seed": comparison.recipe.seed,
            **comparison.conditions(base, step),
        }
    )


@dataclass(frozen=True)
class LayerComparisons:
    """Compares the layers of torch steps (see `smelt.evaluate.layer_sqnr`).

    parents: the step that each step continues from.
    """

    kind: ClassVar[str] = "layer_sqnr"
    recipe: Any
    split: Split
    count: int
    parents: Mapping[str, str | None]

    def is_compared(self, artifact: Artifact) -> bool:
        """Return whether an artifact can be compared."""
        return artifact.format == "torch"

    def conditions(self, base: Artifact, step: Artifact) -> dict[str, Any]:
        """Return what a result depends on, apart from artifacts, samples and seed, as JSON values."""
        from smelt.evaluate.layer_sqnr import SQNR_VERSION

        libraries = package_versions(("torch", "transformers", "tokenizers"))
        return {"version": SQNR_VERSION, "device": self.recipe.device, "libraries": libraries}

    def results(
        self, artifacts: Mapping[str, Artifact], baseline: str, missing: Sequence[str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and the result of each step of `missing`."""
        from smelt.evaluate.layer_sqnr import LayerComparison, NotComparableError, SampleSource, not_compared
        from smelt.runtimes.device import torch_threads

        source = SampleSource(self.split, self.recipe.task, self.count, self.recipe.seed)
        with torch_threads(self.recipe.threads):
            comparison = None
            for name in missing:
                try:
                    comparison = comparison or LayerComparison(
                        artifacts[baseline], source, self.recipe.device
                    )
                except NotComparableError as error:
                    yield name, not_compared(str(error))
                    continue
                blocks = kept_blocks(name, baseline, self.parents, artifacts)
                yield name, comparison.compare(artifacts[name], blocks)


@dataclass(frozen=True)
class TokenComparisons:
    """Compares the next-token distributions of steps (see `smelt.evaluate.layer_sqnr`)."""

    kind: ClassVar[str] = "token_divergence"
    recipe: Any
    split: Split
    count: int

    def is_compared(self, artifact: Artifact) -> bool:
        """Return whether an artifact can be compared."""
        return True

    def conditions(self, base: Artifact, step: Artifact) -> dict[str, Any]:
        """Return what a result depends on, apart from artifacts, samples and seed, as JSON values."""
        from smelt.evaluate.layer_sqnr import TOKEN_DIVERGENCE_VERSION

        score, device = self.recipe.score, self.recipe.device
        runtimes = [
            find_runtime(artifact.format, artifact.manifest.details.get("target"))
            for artifact in (base, step)
        ]
        return {
            "version": TOKEN_DIVERGENCE_VERSION,
            "generation": score.generation.model_dump(),
            "batch_size": score.batch_size,
            "devices": [artifact_device(artifact, device) for artifact in (base, step)],
            "libraries": package_versions([name for runtime in runtimes for name in runtime.libraries]),
        }

    def results(
        self, artifacts: Mapping[str, Artifact], baseline: str, missing: Sequence[str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and the result of each step of `missing`."""
        from smelt.data.splits import spread_indices
        from smelt.evaluate.layer_sqnr import TokenComparison

        if not missing:
            return
        recipe = self.recipe
        indices = spread_indices(len(self.split), self.count, recipe.seed)
        texts = [self.split.examples[index].text for index in indices]
        with closing(open_runner(artifacts[baseline], recipe.threads, recipe.device)) as runner:
            comparison = TokenComparison(runner, texts, recipe.score.generation, recipe.score.batch_size)
        for name in missing:
            with closing(open_runner(artifacts[name], recipe.threads, recipe.device)) as runner:
                yield name, comparison.compare(runner)


def kept_blocks(
    name: str, baseline: str, parents: Mapping[str, str | None], artifacts: Mapping[str, Artifact]
) -> dict[str, list[int]]:
    """Return, by stack, the blocks of the baseline that a step has; only stacks that lost some.

    Empty if the step does not continue from the baseline.
    """
    chain: list[str] = []
    ancestor: str | None = name
    while ancestor is not None and ancestor != baseline:
        chain.append(ancestor)
        ancestor = parents.get(ancestor)
    blocks_by_stack: dict[str, list[int]] = {}
    for step in reversed(chain if ancestor == baseline else []):
        details = artifacts[step].manifest.details if step in artifacts else {}
        shortened = {
            stack: kept_indices for stack in STACK_NAMES if (kept_indices := details.get(f"kept_{stack}"))
        }
        if isinstance(dropped := shortened.get("layers"), Mapping):  # of drop-layers, all stacks
            shortened = dict(dropped)
        for stack, kept_indices in shortened.items():
            previous_blocks = blocks_by_stack.get(stack)
            blocks_by_stack[stack] = (
                [previous_blocks[i] for i in kept_indices]
                if previous_blocks and max(kept_indices) < len(previous_blocks)
                else list(kept_indices)
            )
    return blocks_by_stack
