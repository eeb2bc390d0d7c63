"""The costs of a plan on this machine with a store: finished steps, records of others, free memory and disk.

The predictions are made in `smelt.pipeline.plan`. The keys of steps are computed as a run computes them,
without torch, so that `smelt plan` finds what a run would find.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from smelt.core.artifact import Artifact, StepRecord
from smelt.core.errors import RunError, SmeltError
from smelt.core.files import MANIFEST, load_json
from smelt.core.messages import Message, warning
from smelt.core.store import Store
from smelt.core.system import available_bytes, memory_limit_bytes
from smelt.data.splits import Split
from smelt.evaluate.environment import machine_id, physical_cores
from smelt.pipeline.execute.display import Display
from smelt.pipeline.execute.run_folder import default_store
from smelt.pipeline.execute.sources import import_onnx_model, import_user_model, make_untrained_model
from smelt.pipeline.execute.step_runner import StepRunner, recipe_scorer, recipe_step_runner, resolve_task
from smelt.pipeline.inspect.machine import gpu_memory_bytes, machine_speed
from smelt.pipeline.plan.costs import (
    MachineLimits,
    StepEstimate,
    check_costs,
    estimate_steps,
    require_fitting,
)
from smelt.pipeline.plan.plan import Plan
from smelt.pipeline.plan.predictions import PlanCosts, predict_costs
from smelt.pipeline.recipe.stages import MODEL_STEP

_MAX_MANIFESTS = 200  # the newest artifacts of a store whose records are read


def machine_limits(folder: Path) -> MachineLimits:
    """Return the memory of this machine, and the free disk of `folder` or its nearest existing parent."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    return MachineLimits(
        memory_bytes=memory_limit_bytes(),
        free_bytes=available_bytes(),
        disk_bytes=shutil.disk_usage(existing).free,
        device_bytes=gpu_memory_bytes(),
    )


class _NotStoredError(Exception):
    """The artifact is not in the store."""


class _Lookup(StepRunner):
    """Finds artifacts instead of making them."""

    def get_or_make(
        self, name: str, key: str, fresh: bool, make: Callable[[Path], Artifact]
    ) -> tuple[Artifact, bool]:
        """Return the artifact `key` from the store; raise `_NotStoredError` if it is not there."""
        found = self.store.find(key)
        if found is None:
            raise _NotStoredError
        return found, True


def stored_steps(plan: Plan, data: Mapping[str, Split], store: Store) -> set[str]:
    """Return the names of the steps whose artifacts are in the store, with `NAME:score` if it is scored.

    Args:
        plan: a checked recipe.
        data: all splits.
        store: in which they are looked up.
    """
    display, recipe, graph = Display(None, quiet=True), plan.recipe, plan.third_party_model
    scorer = recipe_scorer(recipe, store)
    made = recipe_step_runner(recipe, store, data, scorer, display)
    lookup = _Lookup(**{name: getattr(made, name) for name in StepRunner.__dataclass_fields__})
    artifacts: dict[str, Artifact] = {}
    # what is wrong with model, data or a stored file is reported by the run
    with suppress(_NotStoredError, SmeltError):
        if graph is not None and graph.tokenizer_folder is None:
            artifacts[MODEL_STEP] = import_onnx_model(lookup, graph, data, False)[0]
        else:
            settled = resolve_task(plan, data, scorer.metrics)
            scorer = replace(scorer, metrics=settled.metrics)
            lookup = replace(lookup, validation_scorer=scorer)
            if graph is not None:
                found = import_onnx_model(lookup, graph, data, False, settled.task_setup)
            elif isinstance(recipe.model, str):
                found = import_user_model(lookup, settled.folder, settled.task_setup, False)
            else:
                found = make_untrained_model(lookup, recipe, settled.task_setup, False)
            artifacts[MODEL_STEP] = found[0]
    for step in plan.steps if artifacts else ():
        if all(name in artifacts for name in step.dependencies):
            with suppress(_NotStoredError, SmeltError):
                above = {name: artifacts[name] for name in plan.ancestor_names(step)}
                artifacts[step.name] = lookup.run_step(step, above, False)[0]
    scorer = replace(scorer, reference=artifacts.get(recipe.baseline)) if scorer.needs_reference else scorer
    judged = data.get(plan.judged_on)
    scored = {
        f"{name}:score"
        for name, artifact in artifacts.items()
        if judged is not None and scorer.cached_score(artifact, judged) is not None
    }
    return {*artifacts, *scored}


def step_records(root: Path, threads: int | None) -> list[StepRecord]:
    """Return the records of artifacts in a store that this machine made with these threads, newest first."""
    manifests = sorted(_manifests(root), reverse=True)[:_MAX_MANIFESTS]
    machine, count, found = machine_id(), threads or physical_cores(), list[StepRecord]()
    for _, file in manifests:
        with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged one is reported where it is used
            record = load_json(file).get("record")
            if record and record["machine"] == machine and record["threads"] == count:
                found.append(StepRecord.model_validate(record))
    return found


def _manifests(root: Path) -> Iterator[tuple[float, Path]]:
    for file in (root / "artifacts").glob(f"*/{MANIFEST}"):
        with suppress(OSError):
            yield file.stat().st_mtime, file


def plan_costs(
    plan: Plan, out: Path | None = None, store: Path | None = None, measure: bool = False
) -> PlanCosts:
    """Return the predicted costs of a run of `plan` on this machine.

    Args:
        plan: a checked recipe.
        out: the run's folder; None: the default.
        store: None: the default.
        measure: whether the speeds of this machine are measured in any case.

    Raises:
        InputError: a weight file is missing or damaged.
        RunError: `measure` is set, and the speeds could not be measured.
    """
    folder = (out or Path("runs") / plan.path.stem).resolve()
    root = store or default_store(folder)[0]
    data, unread = dict(plan.splits), [n for n in plan.recipe.data.split_sources() if n not in plan.splits]
    stored: set[str] = set()
    if (root / "artifacts").is_dir() and any((root / "artifacts").iterdir()):
        with suppress(SmeltError):  # mistakes in large files are reported by the run
            data, unread = plan.read_data(), []
            stored = stored_steps(plan, data, Store(root))
    estimates, limits = estimate_steps(plan, data), machine_limits(root)
    place = next(place for place in (root, *root.absolute().parents) if place.is_dir())
    try:
        speed, failures = machine_speed(plan.recipe.threads, place, measure), list[Message]()
    except RunError as error:
        if measure:
            raise
        speed, failures = None, [warning("speed-not-measured", str(error))]
    records = step_records(root, plan.recipe.threads)
    found = predict_costs(plan, estimates, limits, speed, stored=stored, records=records, unread=unread)
    return replace(found, messages=(*found.messages, *failures))


def estimate_run(
    plan: Plan, data: Mapping[str, Split], store: Store, rebuild: bool
) -> tuple[dict[str, StepEstimate], Sequence[Message]]:
    """Return the estimates of a run's steps, and warnings about those that may not fit.

    Args:
        plan: of the run.
        data: its samples.
        store: of the run.
        rebuild: whether steps are built again that are in the store.

    Raises:
        InputError: a step cannot fit into memory or disk (`needs-more-memory`, `needs-more-disk`).
    """
    estimates, limits = estimate_steps(plan, data), machine_limits(store.root)
    found = check_costs(plan, estimates, limits, file=str(plan.path))
    if found and not rebuild:
        stored = stored_steps(plan, data, store)
        found = check_costs(plan, estimates, limits, stored, str(plan.path))
    require_fitting(found)
    return estimates, found
