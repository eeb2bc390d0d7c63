"""Compare the steps of a run with the baseline: layers, next tokens. Results are stored and reused.

The time and memory of comparisons that a run made all at once are stored for later plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from smelt.core.artifact import Artifact, StepRecord
from smelt.core.errors import SmeltError, rust_panics_as_errors
from smelt.core.files import json_hash, read_hashed_json
from smelt.core.messages import Message, warning
from smelt.core.store import Store
from smelt.core.system import package_versions, peak_memory_bytes, reset_peak_memory
from smelt.data.splits import Split, spread_indices
from smelt.evaluate.environment import default_threads, machine_id
from smelt.models.families.layout import STACK_NAMES
from smelt.pipeline.inspect.machine import artifact_device
from smelt.pipeline.plan.costs import compared_steps, skipped_comparisons_message
from smelt.runtimes.registry import find_runtime, open_runner
from smelt.stage import Progress

if TYPE_CHECKING:
    from smelt.pipeline.execute.display import Display
    from smelt.pipeline.execute.report_builder import ReportBuilder
    from smelt.pipeline.plan.costs import StepEstimate
    from smelt.pipeline.plan.plan import Plan

# Raised whenever the same models and samples would give another result; here, because plans do without torch.
_SQNR_VERSION = 2
_TOKEN_DIVERGENCE_VERSION = 1
# Receives the name of a step and the values of report.json.
OnCompared = Callable[[str, Mapping[str, Any]], None]


class BaselineComparison(Protocol):
    """One kind of comparison. kind: its name, also the key of a stored result. work: what is compared."""

    kind: ClassVar[str]
    work: ClassVar[str]

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
) -> bool:
    """Compare each artifact of `artifacts`, by step name, with that of the step `baseline`.

    progress: called after each step that was not compared yet. on_compared: called with the result of each.
    Returns whether all were compared now: no result was in the store.
    """
    baseline_artifact = artifacts.get(baseline)
    if baseline_artifact is None:
        return True
    keys = _result_keys(comparison, artifacts, baseline_artifact)
    stored = {name: score for name in keys if (score := store.read_score(keys[name]))}
    for name, score in stored.items():
        on_compared(name, score[comparison.kind])
    missing_names = [name for name in keys if name not in stored]
    for count, (name, result) in enumerate(comparison.results(artifacts, baseline, missing_names), 1):
        store.write_score(keys[name], {"artifact": artifacts[name].key, comparison.kind: result})
        on_compared(name, result)
        progress(count, len(missing_names), name)
    return not stored


def _result_keys(
    comparison: BaselineComparison, artifacts: Mapping[str, Artifact], baseline: Artifact
) -> dict[str, str]:
    """Return the key of the result of each step that is compared."""
    if not comparison.is_compared(baseline):
        return {}
    return {
        name: _result_key(comparison, baseline, artifact)
        for name, artifact in artifacts.items()
        if comparison.is_compared(artifact) and artifact.key != baseline.key
    }


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
    work: ClassVar[str] = "layers"
    recipe: Any
    split: Split
    count: int
    parents: Mapping[str, str | None]

    def is_compared(self, artifact: Artifact) -> bool:
        """Return whether an artifact can be compared."""
        return artifact.format == "torch"

    def conditions(self, base: Artifact, step: Artifact) -> dict[str, Any]:
        """Return what a result depends on, apart from artifacts, samples and seed, as JSON values."""
        libraries = package_versions(("torch", "transformers", "tokenizers"))
        return {"version": _SQNR_VERSION, "device": self.recipe.device, "libraries": libraries}

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
    """Compares the next-token distributions of steps (see `smelt.evaluate.token_divergence`)."""

    kind: ClassVar[str] = "token_divergence"
    work: ClassVar[str] = "tokens"
    recipe: Any
    split: Split
    count: int

    def is_compared(self, artifact: Artifact) -> bool:
        """Return whether an artifact can be compared."""
        return True

    def conditions(self, base: Artifact, step: Artifact) -> dict[str, Any]:
        """Return what a result depends on, apart from artifacts, samples and seed, as JSON values."""
        score, device = self.recipe.score, self.recipe.device
        runtimes = [
            find_runtime(artifact.format, artifact.manifest.details.get("target"))
            for artifact in (base, step)
        ]
        return {
            "version": _TOKEN_DIVERGENCE_VERSION,
            "generation": score.generation.model_dump(),
            "batch_size": score.batch_size,
            "devices": [artifact_device(artifact, device) for artifact in (base, step)],
            "libraries": package_versions([name for runtime in runtimes for name in runtime.libraries]),
        }

    def results(
        self, artifacts: Mapping[str, Artifact], baseline: str, missing: Sequence[str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and the result of each step of `missing`."""
        from smelt.evaluate.token_divergence import TokenComparison

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


def baseline_parameters(artifacts: Mapping[str, Artifact], baseline: str) -> int | None:
    """Return the parameters of the baseline; None: unknown."""
    artifact = artifacts.get(baseline)
    return None if artifact is None else artifact.manifest.details.get("parameters")


def _comparisons(
    plan: Plan, data: Mapping[str, Split], parameters: int | None, parents: Mapping[str, str | None]
) -> tuple[LayerComparisons, TokenComparisons]:
    """Return the comparisons of a run with a baseline of so many `parameters`; see `LayerComparisons`."""
    recipe, score_split = plan.recipe, data[plan.judged_on]
    layer_samples, token_samples = recipe.score.compared_samples(parameters)
    layers = LayerComparisons(recipe, data.get("validation") or score_split, layer_samples, parents)
    return layers, TokenComparisons(recipe, score_split, token_samples)


def are_comparisons_stored(
    plan: Plan, data: Mapping[str, Split], store: Store, artifacts: Mapping[str, Artifact]
) -> bool:
    """Return whether the folder of the store has the results of all comparisons of a run of `plan`.

    Args:
        plan: a checked recipe.
        data: all splits.
        store: of the run.
        artifacts: in the store, of steps by their names.
    """
    baseline = artifacts.get(plan.recipe.baseline)
    if baseline is None or plan.judged_on not in data:
        return False
    comparisons: list[BaselineComparison] = []
    comparisons += _comparisons(plan, data, baseline_parameters(artifacts, plan.recipe.baseline), {})
    keys: list[str] = []
    for comparison, names in zip(comparisons, compared_steps(plan), strict=True):
        if comparison.count and any(name not in artifacts for name in names):
            return False
        if comparison.count:
            keys += _result_keys(comparison, {name: artifacts[name] for name in names}, baseline).values()
    return bool(keys) and all(store.has_score(key) for key in keys)


@dataclass(frozen=True)
class RunComparisons:
    """The comparisons of one run, after its last step.

    estimate: what the plan estimated for them; None: nothing is recorded. turn: a context in which no other
    worker of this machine measures latency. explain: returns an error with a message for the user.
    """

    plan: Plan
    data: Mapping[str, Split]
    store: Store
    display: Display
    report: ReportBuilder
    estimate: StepEstimate | None
    turn: Callable[[], AbstractContextManager[None]]
    explain: Callable[[Exception, str], SmeltError]

    def compare(self, artifacts: Mapping[str, Artifact]) -> list[Message]:
        """Compare layers and next tokens of scored steps with the baseline's, and report them.

        A failure only gives a warning.

        Args:
            artifacts: of the scored steps, by their names.
        """
        baseline, report, score = self.plan.recipe.baseline, self.report, self.plan.recipe.score
        parents = {step["name"]: step["parent"] for step in report.data["steps"]}
        parameters = baseline_parameters(artifacts, baseline)
        layers, tokens = _comparisons(self.plan, self.data, parameters, parents)
        generates = self.plan.recipe.traits.generates
        with_texts = {
            name: artifact
            for name, artifact in artifacts.items()
            if generates and report.can_compare_tokens(name)
        }
        messages, skipped = list[Message](), list[str]()
        planned_layers, planned_tokens = map(set, compared_steps(self.plan))
        is_measured = planned_layers <= artifacts.keys() and planned_tokens <= with_texts.keys()
        start_time, is_reset = time.monotonic(), reset_peak_memory()
        if len(artifacts) > 1:
            if layers.count:
                is_measured &= self._compare(
                    layers, "sqnr_samples", artifacts, report.add_layer_sqnr, messages
                )
            elif score.sqnr_samples is None:
                skipped.append("sqnr_samples")
        if len(with_texts) > 1:
            if tokens.count:
                is_measured &= self._compare(
                    tokens, "kl_samples", with_texts, report.add_token_divergence, messages
                )
            elif score.kl_samples is None:
                skipped.append("kl_samples")
        if skipped and parameters is not None:
            messages.append(skipped_comparisons_message(baseline, parameters, skipped))
        if is_measured and self.estimate is not None:
            peak = peak_memory_bytes() if is_reset else None
            _store_record(self.store, self.estimate, self.plan.recipe.threads, start_time, peak)
        return messages

    def _compare(
        self,
        comparison: BaselineComparison,
        setting: str,
        artifacts: Mapping[str, Artifact],
        on_compared: OnCompared,
        messages: list[Message],
    ) -> bool:
        """Return whether all steps were compared now; a failure becomes one of `messages`."""
        work, baseline = comparison.work, self.plan.recipe.baseline
        self.display.start_work(work)
        try:
            with rust_panics_as_errors(), self.turn():
                return compare_with_baseline(
                    comparison, self.store, artifacts, baseline, self.display.progress, on_compared
                )
        except Exception as error:
            failure = self.explain(error, work)
            text = f"{work.title()} were not compared with the baseline's (score: {setting}): {failure}"
            messages.append(warning("comparison-failed", text))
            return False


_MAX_RECORDS = 20  # the newest that are kept


def _records_key(threads: int | None) -> str:
    return json_hash(
        {"records": "comparisons", "machine": machine_id(), "threads": threads or default_threads()}
    )


def comparison_records(root: Path, threads: int | None) -> list[StepRecord]:
    """Return the records of comparisons that this machine made with these threads, newest first.

    Args:
        root: the folder of the store.
        threads: of the recipe; None: the default.
    """
    stored = read_hashed_json(root / "scores" / f"{_records_key(threads)}.json") or {}
    return [StepRecord.model_validate(record) for record in stored.get("comparisons", [])]


def _store_record(
    store: Store, estimate: StepEstimate, threads: int | None, start_time: float, peak: int | None
) -> None:
    """Store the measured time and memory of comparisons, if their work is known."""
    if estimate.size is None or not estimate.size.work:
        return
    record = StepRecord(
        kind=estimate.kind,
        machine=machine_id(),
        threads=threads or default_threads(),
        seconds=round(time.monotonic() - start_time, 3),
        memory_bytes=peak,
        estimated_memory_bytes=estimate.size.memory_bytes,
        work=estimate.size.work,
    )
    records = [record, *comparison_records(store.root, threads)][:_MAX_RECORDS]
    store.write_score(
        _records_key(threads), {"comparisons": [each.model_dump(mode="json") for each in records]}
    )
