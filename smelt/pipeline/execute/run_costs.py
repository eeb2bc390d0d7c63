"""The predicted costs of a plan on this machine with a store: finished steps, records of others, free memory.

The keys of steps are computed as a run computes them,
without torch, so that `smelt plan` finds what a run would find.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from smelt.core.artifact import Artifact, StepRecord
from smelt.core.errors import SmeltError
from smelt.core.files import MANIFEST, read_hashed_json
from smelt.core.messages import Message, messages_to_json, warning
from smelt.core.remote_store import RemoteStore, open_remote_store
from smelt.core.store import Store
from smelt.core.system import available_bytes, memory_limit_bytes
from smelt.data.splits import Split
from smelt.evaluate.environment import default_threads, machine_id
from smelt.models.model_size import MIN_CALIBRATION_SAMPLES
from smelt.pipeline.execute.baseline_comparisons import are_comparisons_stored, comparison_records
from smelt.pipeline.execute.display import Display
from smelt.pipeline.execute.run_folder import StorePlace, default_store, moved_run_text
from smelt.pipeline.execute.sources import import_onnx_model, import_user_model, make_untrained_model
from smelt.pipeline.execute.step_runner import StepRunner, recipe_scorer, recipe_step_runner, resolve_task
from smelt.pipeline.inspect.machine import gpu_memory_bytes
from smelt.pipeline.plan.costs import (
    COMPARISONS,
    MachineLimits,
    StepEstimate,
    check_costs,
    estimate_steps,
    format_bytes,
    require_fitting,
    skipped_comparisons,
)
from smelt.pipeline.plan.plan import Plan
from smelt.pipeline.recipe.stages import MODEL_STEP

# Files of an artifact besides the weights: tokenizer, config, manifest.
_SMALL_FILES_BYTES = 3_000_000


@dataclass(frozen=True)
class StepPrediction:
    """The prediction for one step; None: unknown.

    source: stored (the artifact is in the store and costs nothing), measured (seconds by an earlier step of
    this machine), or unknown (no seconds). measured_seconds: of that earlier step, before they were scaled to
    this one's work. memory_bytes: with the interpreter; without activations, unless measured.
    """

    name: str
    source: str
    seconds: float | None = None
    measured_seconds: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    temporary_bytes: int = 0
    device_bytes: int = 0
    calibration_tokens: int | None = None


@dataclass(frozen=True)
class PlanCosts:
    """The predictions of a plan, and the messages about what does not fit: errors, then warnings."""

    steps: tuple[StepPrediction, ...]
    limits: MachineLimits
    messages: tuple[Message, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """Seconds of the steps, without the import of the model and scores; None if a part is unknown."""
        times = [step.seconds for step in self.steps if step.name != MODEL_STEP]
        known = [seconds for seconds in times if seconds is not None]
        return sum(known) if len(known) == len(times) else None

    @property
    def memory_bytes(self) -> int:
        """The largest memory of a step."""
        return max((step.memory_bytes or 0 for step in self.steps), default=0)

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
        return {
            "steps": [asdict(step) for step in self.steps],
            "seconds": self.seconds,
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "limits": asdict(self.limits),
            "unread": list(self.unread),
        }


def _predict(estimate: StepEstimate, stored: Collection[str]) -> StepPrediction:
    size = estimate.size
    if estimate.name in stored:
        return StepPrediction(estimate.name, "stored", 0.0, None, 0, 0)
    if size is None:
        return StepPrediction(estimate.name, "unknown")
    return StepPrediction(
        estimate.name,
        "unknown" if estimate.seconds is None else "measured",
        estimate.seconds,
        None if estimate.record is None else estimate.record.seconds,
        estimate.memory_bytes,
        0 if estimate.name == COMPARISONS else size.disk_bytes + _SMALL_FILES_BYTES,
        size.temporary_bytes,
        size.device_bytes,
        size.calibration_tokens,
    )


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


_COLUMNS = "{:<22.22} {:>7} {:>9} {:>9}  {}"
_SAME_TIME = 0.05  # times that differ less are shown as equal


def cost_lines(costs: PlanCosts) -> list[str]:
    """Return the table of predictions, at most 80 columns."""
    rows = [("step", "time", "memory", "disk", "")]
    for step in costs.steps:
        seconds = "" if step.name == MODEL_STEP else _time(step.seconds)
        rows.append((step.name, seconds, _size(step.memory_bytes), _size(step.disk_bytes), _note(step)))
    rows.append(
        ("total without scores", _time(costs.seconds), _size(costs.memory_bytes), _size(costs.disk_bytes), "")
    )
    rows.append(
        ("this machine, free", "", _size(costs.limits.free_bytes), _size(costs.limits.disk_bytes), "")
    )
    lines = [_COLUMNS.format(*row).rstrip() for row in rows]
    if any(step.source == "unknown" for step in costs.steps if step.name != MODEL_STEP):
        lines.append("?           no similar step of an earlier run on this machine is in the store")
    for message in costs.messages:
        if message.severity != "error":
            lines += textwrap.wrap(f"{message.severity:11} {message}", 80, subsequent_indent=" " * 12)
    device = max((step.device_bytes for step in costs.steps), default=0)
    if device:
        lines.append(f"GPU memory: {_size(device)} of {_size(costs.limits.device_bytes)}")
    by_tokens: dict[int, list[str]] = {}
    for step in costs.steps:
        if step.calibration_tokens:
            by_tokens.setdefault(step.calibration_tokens, []).append(step.name)
    for tokens, names in by_tokens.items():
        text = (
            f"calibration {tokens:,} tokens, at least {MIN_CALIBRATION_SAMPLES} samples: {', '.join(names)}"
        )
        lines += textwrap.wrap(text, 80, subsequent_indent=" " * 12)
    if costs.unread:
        lines.append(f"times that depend on {', '.join(costs.unread)} are unknown: not read for a plan")
    return lines


def _note(step: StepPrediction) -> str:
    """Return where the time of a step is known from."""
    if step.source == "stored":
        return "in the store"
    if step.seconds is None or step.measured_seconds is None:
        return ""
    is_scaled = abs(step.seconds - step.measured_seconds) > _SAME_TIME * step.measured_seconds
    return (
        f"scaled from {_time(step.measured_seconds)} measured" if is_scaled else "measured in an earlier run"
    )


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
    """A store in which a plan looks things up, also in the manifests of a remote one; nothing is copied."""

    def find(self, key: str, hint: str = "") -> Artifact | None:
        """Return the artifact with this key; one of the remote store has no files here."""
        if (artifact := super().find(key, hint)) is not None:
            return artifact
        with self._using_remote() as remote:
            manifest = None if remote is None else remote.read_manifest(key)
            return None if manifest is None else Artifact(self.root / "artifacts" / key, manifest)
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
    """Return the names of the steps whose artifacts are in the store, and `COMPARISONS` if these are too.

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
    return {*artifacts, *([COMPARISONS] if are_comparisons_stored(plan, data, store, artifacts) else [])}


def step_records(root: Path, threads: int | None) -> list[StepRecord]:
    """Return the records of artifacts in a store that this machine made with these threads, newest first.

    Then those of comparisons with baselines.
    """
    manifests = sorted(_manifests(root), reverse=True)[:_MAX_MANIFESTS]
    machine, count, records = machine_id(), threads or default_threads(), list[StepRecord]()
    for _, file in manifests:
        with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged one is reported where it is used
            record = (read_hashed_json(file) or {}).get("record")
            if record and record["machine"] == machine and record["threads"] == count:
                records.append(StepRecord.model_validate(record))
    return [*records, *comparison_records(root, threads)]


def _manifests(root: Path) -> Iterator[tuple[float, Path]]:
    for file in (root / "artifacts").glob(f"*/{MANIFEST}"):
        with suppress(OSError):
            yield file.stat().st_mtime, file


def plan_costs(plan: Plan, out: Path | None = None, store: StorePlace | None = None) -> PlanCosts:
    """Return the predicted costs of a run of `plan` on this machine.

    Args:
        plan: a checked recipe.
        out: the run's folder; None: the default.
        store: a folder, or the URL of a remote store, from which nothing is copied; None: the default.

    Raises:
        InputError: a weight file is missing or damaged, or the remote store cannot be used.
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
    estimates = estimate_steps(plan, data, step_records(root, plan.recipe.threads))
    limits = machine_limits(root)
    if text := moved_run_text(folder, root):
        failures.append(
            warning("moved-run", f"Steps of the earlier run in this folder are not reused: {text}")
        )
    costs = check_costs(plan, estimates, limits, stored)
    messages = (*costs, *skipped_comparisons(plan, estimates), *failures)
    steps = tuple(_predict(estimate, stored) for estimate in estimates.values())
    return PlanCosts(steps, limits, messages, tuple(unread_splits))


def estimate_run(
    plan: Plan,
    data: Mapping[str, Split],
    store: Store,
    rebuild: bool,
    node_bytes: int | None = None,
    is_compared: bool = True,
) -> tuple[dict[str, StepEstimate], Sequence[Message]]:
    """Return the estimates of a run's steps, and warnings about those that may not fit.

    Args:
        plan: of the run.
        data: its samples.
        store: of the run.
        rebuild: whether steps are built again that are in the store.
        node_bytes: memory of the largest node of a cluster that runs the steps; None: this machine does. The
            memory that tasks can reserve is less than the node's, so that no step is refused by it.
        is_compared: whether the run compares layers and next tokens with the baseline's.

    Raises:
        InputError: a step cannot fit into memory or disk (`needs-more-memory`, `needs-more-disk`).
    """
    estimates = estimate_steps(plan, data, step_records(store.root, plan.recipe.threads))
    if not is_compared:
        estimates.pop(COMPARISONS, None)
    limits = machine_limits(store.root)
    if node_bytes is not None:
        limits = replace(limits, memory_bytes=sys.maxsize, free_bytes=node_bytes, device_bytes=None)
    messages = check_costs(plan, estimates, limits, file=str(plan.path))
    if messages and not rebuild:
        stored = stored_steps(plan, data, store)
        messages = check_costs(plan, estimates, limits, stored, str(plan.path))
    require_fitting(messages)
    return estimates, messages
