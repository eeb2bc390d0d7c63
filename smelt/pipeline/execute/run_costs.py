"""The predicted costs of a plan on this machine with a store: finished steps, records of others, free memory.

The keys of steps are computed as a run computes them,
without torch, so that `smelt plan` finds what a run would find.

Estimates (`smelt/pipeline/plan/costs.py`) become seconds by the speeds of this machine. Where the store has
artifacts of the same kind of step that this machine made, the estimate is multiplied by their median ratio of
measured to estimated.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from smelt.core.artifact import Artifact, StepRecord
from smelt.core.errors import RunError, SmeltError
from smelt.core.files import MANIFEST, read_hashed_json
from smelt.core.messages import Message, messages_to_json, warning
from smelt.core.remote_store import RemoteStore, open_remote_store
from smelt.core.store import Store
from smelt.core.system import available_bytes, memory_limit_bytes
from smelt.data.splits import Split
from smelt.evaluate.environment import default_threads, machine_id
from smelt.models.costs import INTERPRETER_BYTES, Work
from smelt.pipeline.execute.display import Display
from smelt.pipeline.execute.run_folder import StorePlace, default_store, moved_run_text
from smelt.pipeline.execute.sources import import_onnx_model, import_user_model, make_untrained_model
from smelt.pipeline.execute.step_runner import StepRunner, recipe_scorer, recipe_step_runner, resolve_task
from smelt.pipeline.inspect.machine import MachineSpeed, gpu_memory_bytes, machine_speed
from smelt.pipeline.plan.costs import (
    MachineLimits,
    StepEstimate,
    check_costs,
    estimate_steps,
    format_bytes,
    require_fitting,
)
from smelt.pipeline.plan.plan import Plan
from smelt.pipeline.recipe.stages import MODEL_STEP

# Files of an artifact besides the weights: tokenizer, config, manifest.
_SMALL_FILES_BYTES = 3_000_000
_WORKER_SECONDS = 5.0  # the start of a timing process


@dataclass(frozen=True)
class StepPrediction:
    """The prediction for one step; None: unknown.

    source: measured (by the ratio in earlier runs), estimated, stored (the artifact is in the store and costs
    nothing), or unknown. memory_bytes: with the interpreter. scoring_*: of scoring its artifact.
    """

    name: str
    source: str
    seconds: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    temporary_bytes: int = 0
    device_bytes: int = 0
    scoring_seconds: float | None = None
    scoring_memory_bytes: int | None = None


@dataclass(frozen=True)
class PlanCosts:
    """The predictions of a plan, and the messages about what does not fit: errors, then warnings."""

    steps: tuple[StepPrediction, ...]
    limits: MachineLimits
    latency_seconds: float | None = None
    messages: tuple[Message, ...] = ()
    unread: tuple[str, ...] = field(default=())

    @property
    def seconds(self) -> float | None:
        """Seconds of the run; None if a part is unknown."""
        durations = [self.latency_seconds or 0.0]
        for step in self.steps:
            if step.seconds is None or step.scoring_seconds is None:
                return None
            durations += [step.seconds, step.scoring_seconds]
        return sum(durations)

    @property
    def memory_bytes(self) -> int:
        """The largest memory of a step or of its scoring."""
        return max((max(s.memory_bytes or 0, s.scoring_memory_bytes or 0) for s in self.steps), default=0)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all new artifacts, and of the temporary files of one step."""
        max_temporary = max((step.temporary_bytes for step in self.steps), default=0)
        return sum(step.disk_bytes or 0 for step in self.steps) + max_temporary

    @property
    def errors(self) -> list[Message]:
        """What cannot fit."""
        return [message for message in self.messages if message.severity == "error"]

    def to_json(self) -> dict[str, Any]:
        """Return the predictions as JSON values."""
        names = StepPrediction.__dataclass_fields__
        return {
            "steps": [{name: getattr(step, name) for name in names} for step in self.steps],
            "seconds": self.seconds,
            "latency_seconds": self.latency_seconds,
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "limits": {name: getattr(self.limits, name) for name in MachineLimits.__dataclass_fields__},
            "unread": list(self.unread),
        }


def predict_costs(
    plan: Plan,
    estimates: Mapping[str, StepEstimate],
    limits: MachineLimits,
    speed: MachineSpeed | None,
    *,
    stored: Collection[str] = (),
    records: Sequence[StepRecord] = (),
    unread: Collection[str] = (),
) -> PlanCosts:
    """Return the predictions of all steps.

    Args:
        plan: the plan.
        estimates: of its steps.
        limits: of this machine.
        speed: of this machine; None: no times.
        stored: names of steps whose artifacts are in the store; `NAME:score` for their scores.
        records: of earlier steps on this machine with the same threads, newest first.
        unread: the splits that were not read.
    """
    base = INTERPRETER_BYTES if speed is None else speed.base_bytes
    steps = tuple(
        _predict(estimate, base, speed, stored, [r for r in records if r.kind == estimate.kind])
        for estimate in estimates.values()
    )
    costs = PlanCosts(
        steps, limits, messages=tuple(check_costs(plan, estimates, limits, stored)), unread=tuple(unread)
    )
    return replace(costs, latency_seconds=None if speed is None else _latency_seconds(plan, costs))


_MAX_RECORDS = 5  # of the same kind of step


def _predict(
    estimate: StepEstimate,
    base: int,
    speed: MachineSpeed | None,
    stored: Collection[str],
    records: Sequence[StepRecord],
) -> StepPrediction:
    cost, score = estimate.cost, estimate.score
    scoring: dict[str, Any] = {}
    if f"{estimate.name}:score" in stored:
        scoring = {"scoring_seconds": 0.0, "scoring_memory_bytes": 0}
    elif score is not None:
        can_estimate = score.work is not None and speed is not None
        scoring = {
            "scoring_seconds": speed.seconds(score.work) if can_estimate and speed and score.work else None,
            "scoring_memory_bytes": score.memory_bytes + base,
        }
    if estimate.name in stored:
        return StepPrediction(estimate.name, "stored", 0.0, 0, 0, **scoring)
    if cost is None:
        return StepPrediction(estimate.name, "unknown", **scoring)
    times, memories, source = list[float](), list[float](), "estimated"
    for record in records[:_MAX_RECORDS] if speed is not None else ():
        source = "measured"
        if expected := speed.seconds(Work.from_json(record.work)) if speed else 0.0:
            times.append(record.seconds / expected)
        if record.memory_bytes is not None:
            memories.append(record.memory_bytes / (record.estimated_memory_bytes + base))
    seconds = None
    if cost.work is not None and speed is not None and (times or not estimate.is_gpu):
        seconds = speed.seconds(cost.work) * (statistics.median(times) if times else 1.0)
    memory = (cost.memory_bytes + base) * (statistics.median(memories) if memories else 1.0)
    return StepPrediction(
        estimate.name,
        source,
        seconds,
        round(memory),
        cost.disk_bytes + _SMALL_FILES_BYTES,
        cost.temporary_bytes,
        cost.device_bytes,
        **scoring,
    )


def _latency_seconds(plan: Plan, costs: PlanCosts) -> float | None:
    """Return the seconds of the latency measurements: rounds of each artifact, up to the time limits."""
    settings = plan.recipe.score.latency
    if not settings:
        return 0.0
    formats = {step.name: step.format for step in plan.steps if not step.unscored}
    timed_names = [name for name, kind in formats.items() if settings.is_timed(name, kind != "torch")]
    timed_names += [plan.recipe.baseline] if plan.recipe.baseline not in timed_names else []
    artifact_seconds = 2 * settings.rounds * settings.min_round_ms / 1000
    total_seconds = len(timed_names) * (
        _WORKER_SECONDS + len(settings.batch_sizes) * min(artifact_seconds, settings.seconds)
    )
    stages = [step.seconds or 0.0 for step in costs.steps]
    return min(total_seconds, settings.max_minutes * 60 if settings.max_minutes else max(60.0, sum(stages)))


def plan_json(plan: Plan, costs: PlanCosts) -> dict[str, Any]:
    """Return a plan and its predictions as JSON values."""
    steps = [
        {
            "name": step.name,
            "stage": step.stage,
            "parent": step.parent,
            "format": step.format,
            "settings": step.settings.to_report(),
            "optional": step.optional,
            "unavailable": step.unavailable,
        }
        for step in plan.steps
    ]
    return {
        "recipe": str(plan.path),
        "task": plan.recipe.task,
        "steps": steps,
        "warnings": messages_to_json([*plan.warnings, *costs.messages]),
        "costs": costs.to_json(),
    }


_COLUMNS = "{:<28.28} {:>9} {:>8} {:>8} {:>9}  {}"


def cost_lines(costs: PlanCosts) -> list[str]:
    """Return the table of predictions, at most 80 columns."""
    rows = [("step", "time", "memory", "disk", "scoring", "")]
    for step in costs.steps:
        source_text = "" if step.source == "estimated" else step.source
        rows.append(
            (step.name, _time(step.seconds), _size(step.memory_bytes), _size(step.disk_bytes),
             _time(step.scoring_seconds), source_text)
        )  # fmt: skip
    if costs.latency_seconds:
        rows.append(("latency", _time(costs.latency_seconds), "", "", "", ""))
    rows.append(("total", _time(costs.seconds), _size(costs.memory_bytes), _size(costs.disk_bytes), "", ""))
    rows.append(
        ("this machine, free", "", _size(costs.limits.free_bytes), _size(costs.limits.disk_bytes), "", "")
    )
    lines = [_COLUMNS.format(*row).rstrip() for row in rows]
    for message in costs.messages:
        if message.severity != "error":
            lines += textwrap.wrap(f"warning     {message}", 80, subsequent_indent=" " * 12)
    device = max((step.device_bytes for step in costs.steps), default=0)
    if device:
        lines.append(f"GPU memory: {_size(device)} of {_size(costs.limits.device_bytes)}")
    if costs.unread:
        lines.append(f"times that depend on {', '.join(costs.unread)} are unknown: not read for a plan")
    return lines


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _size(count: int | None) -> str:
    return "?" if count is None else format_bytes(count)


_MAX_MANIFESTS = 200  # the newest artifacts of a store whose records are read


def machine_limits(folder: Path) -> MachineLimits:
    """Return the memory of this machine, and the free disk of `folder` or its nearest existing parent."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return MachineLimits(
        memory_bytes=memory_limit_bytes(),
        free_bytes=available_bytes(),
        disk_bytes=shutil.disk_usage(existing).free,
        device_bytes=gpu_memory_bytes(),
    )


class _NotStoredError(Exception):
    """The artifact is not in the store."""


class _PlannedStore(Store):
    """A store in which a plan looks things up: manifests and scores of a remote one; nothing is copied."""

    def find(self, key: str, hint: str = "") -> Artifact | None:
        """Return the artifact with this key; one of the remote store has no files here."""
        if (artifact := super().find(key, hint)) is not None:
            return artifact
        with self._using_remote() as remote:
            manifest = None if remote is None else remote.read_manifest(key)
            return None if manifest is None else Artifact(self.root / "artifacts" / key, manifest)
        return None

    def read_score(self, key: str) -> dict[str, Any] | None:
        """Return the score stored under `key`, or None."""
        value = read_hashed_json(self.root / "scores" / f"{key}.json")
        if value is not None:
            return value
        with self._using_remote() as remote:
            return None if remote is None else remote.read_score(key)
        return None

    def _pull(self, key: str) -> bool:
        return False

    def _push(self, name: str, push: Callable[[RemoteStore], None]) -> None:
        pass


class _Lookup(StepRunner):
    """Finds artifacts instead of making them."""

    def get_or_make(
        self, name: str, key: str, fresh: bool, make: Callable[[Path], Artifact]
    ) -> tuple[Artifact, bool]:
        """Return the artifact `key` from the store; raise `_NotStoredError` if it is not there."""
        artifact = self.store.find(key)
        if artifact is None:
            raise _NotStoredError
        return artifact, True


def stored_steps(plan: Plan, data: Mapping[str, Split], store: Store) -> set[str]:
    """Return the names of the steps whose artifacts are in the store, with `NAME:score` if it is scored.

    Args:
        plan: a checked recipe.
        data: all splits.
        store: in which they are looked up.
    """
    display, recipe, graph = Display(None, quiet=True), plan.recipe, plan.onnx_model
    scorer = recipe_scorer(recipe, store)
    step_runner = recipe_step_runner(recipe, store, data, scorer, display)
    lookup = _Lookup(**{name: getattr(step_runner, name) for name in StepRunner.__dataclass_fields__})
    artifacts: dict[str, Artifact] = {}
    # what is wrong with model, data or a stored file is reported by the run
    with suppress(_NotStoredError, SmeltError):
        if graph is not None and graph.tokenizer_folder is None:
            artifacts[MODEL_STEP] = import_onnx_model(lookup, graph, data, False)[0]
        else:
            resolved = resolve_task(plan, data, scorer.metrics)
            scorer = replace(scorer, metrics=resolved.metrics)
            lookup = replace(lookup, validation_scorer=scorer)
            if graph is not None:
                first_result = import_onnx_model(lookup, graph, data, False, resolved.task_setup)
            elif isinstance(recipe.model, str):
                first_result = import_user_model(lookup, resolved.folder, resolved.task_setup, False)
            else:
                first_result = make_untrained_model(lookup, recipe, resolved.task_setup, False)
            artifacts[MODEL_STEP] = first_result[0]
    for step in plan.steps if artifacts else ():
        if all(name in artifacts for name in step.dependencies):
            with suppress(_NotStoredError, SmeltError):
                ancestors = {name: artifacts[name] for name in plan.ancestor_names(step)}
                artifacts[step.name] = lookup.run_step(step, ancestors, False)[0]
    scorer = replace(scorer, reference=artifacts.get(recipe.baseline)) if scorer.needs_reference else scorer
    score_split = data.get(plan.judged_on)
    scored = {
        f"{name}:score"
        for name, artifact in artifacts.items()
        if score_split is not None and scorer.cached_score(artifact, score_split) is not None
    }
    return {*artifacts, *scored}


def step_records(root: Path, threads: int | None) -> list[StepRecord]:
    """Return the records of artifacts in a store that this machine made with these threads, newest first."""
    manifests = sorted(_manifests(root), reverse=True)[:_MAX_MANIFESTS]
    machine, count, records = machine_id(), threads or default_threads(), list[StepRecord]()
    for _, file in manifests:
        with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged one is reported where it is used
            record = (read_hashed_json(file) or {}).get("record")
            if record and record["machine"] == machine and record["threads"] == count:
                records.append(StepRecord.model_validate(record))
    return records


def _manifests(root: Path) -> Iterator[tuple[float, Path]]:
    for file in (root / "artifacts").glob(f"*/{MANIFEST}"):
        with suppress(OSError):
            yield file.stat().st_mtime, file


def plan_costs(
    plan: Plan, out: Path | None = None, store: StorePlace | None = None, measure: bool = False
) -> PlanCosts:
    """Return the predicted costs of a run of `plan` on this machine.

    Args:
        plan: a checked recipe.
        out: the run's folder; None: the default.
        store: a folder, or the URL of a remote store, from which nothing is copied; None: the default.
        measure: whether the speeds of this machine are measured in any case.

    Raises:
        InputError: a weight file is missing or damaged, or the remote store cannot be used.
        RunError: `measure` is set, and the speeds could not be measured.
    """
    folder = (out or Path("runs") / plan.path.stem).resolve()
    remote = open_remote_store(store) if isinstance(store, str) else None
    root = store if isinstance(store, Path) else default_store(folder)[0]
    data, unread_splits = (
        dict(plan.splits),
        [n for n in plan.recipe.data.split_sources() if n not in plan.splits],
    )
    stored, failures = set[str](), list[Message]()
    has_artifacts = (root / "artifacts").is_dir() and any((root / "artifacts").iterdir())
    if has_artifacts or remote is not None:
        with ExitStack() as stack, suppress(SmeltError):  # errors in large files are reported by the run
            data, unread_splits = plan.read_data(), []
            local_root = root if has_artifacts else Path(stack.enter_context(TemporaryDirectory()))
            stored = stored_steps(plan, data, _PlannedStore(local_root, remote, failures.append))
    estimates, limits = estimate_steps(plan, data), machine_limits(root)
    path = next(path for path in (root, *root.absolute().parents) if path.is_dir())
    try:
        speed = machine_speed(plan.recipe.threads, path, measure)
        if speed.is_disturbed:
            text = (
                "Other work ran while the speed of this machine was measured, so predicted times may be too"
                " long. The next plan measures again."
            )
            failures.append(warning("disturbed-measurement", text))
    except RunError as error:
        if measure:
            raise
        speed = None
        failures.append(warning("speed-not-measured", str(error)))
    if text := moved_run_text(folder, root):
        failures.append(warning("moved-run", text))
    records = step_records(root, plan.recipe.threads)
    costs = predict_costs(
        plan, estimates, limits, speed, stored=stored, records=records, unread=unread_splits
    )
    return replace(costs, messages=(*costs.messages, *failures))


def estimate_run(
    plan: Plan, data: Mapping[str, Split], store: Store, rebuild: bool, node_bytes: int | None = None
) -> tuple[dict[str, StepEstimate], Sequence[Message]]:
    """Return the estimates of a run's steps, and warnings about those that may not fit.

    Args:
        plan: of the run.
        data: its samples.
        store: of the run.
        rebuild: whether steps are built again that are in the store.
        node_bytes: memory of the largest node of a cluster that runs the steps; None: this machine does. The
            memory that tasks can reserve is less than the node's, so that no step is refused by it.

    Raises:
        InputError: a step cannot fit into memory or disk (`needs-more-memory`, `needs-more-disk`).
    """
    estimates, limits = estimate_steps(plan, data), machine_limits(store.root)
    if node_bytes is not None:
        limits = replace(limits, memory_bytes=sys.maxsize, free_bytes=node_bytes, device_bytes=None)
    messages = check_costs(plan, estimates, limits, file=str(plan.path))
    if messages and not rebuild:
        stored = stored_steps(plan, data, store)
        messages = check_costs(plan, estimates, limits, stored, str(plan.path))
    require_fitting(messages)
    return estimates, messages
