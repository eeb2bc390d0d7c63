"""Compress trained models and export them, with every step measured.

`smelt.run(recipe)` runs a recipe, `smelt.plan(recipe)` checks it, `smelt.Recipe` builds one in Python,
`smelt.apply(stage, model, out)` runs one stage, `smelt.load(folder)` opens an artifact, and
`smelt.package(folder)` writes a folder for deployment. Dependencies are imported on the first call, so
`import smelt` is fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import (
    DeviceWarning,
    EngineWarning,
    InputError,
    MissingDependencyError,
    PlanWarning,
    RunError,
    SmeltError,
    TruncationWarning,
)
from smelt.core.thread_waiting import limit_spinning

if TYPE_CHECKING:
    from smelt.api.load import Model
    from smelt.api.recipes import Recipe
    from smelt.core.artifact import Artifact
    from smelt.data.tasks import Task
    from smelt.export.package.write_package import WrittenPackage
    from smelt.pipeline.execute.run_result import Report, Result
    from smelt.pipeline.plan.plan import Plan

limit_spinning()  # before torch is imported, which reads it

__all__ = [
    "DeviceWarning",
    "EngineWarning",
    "InputError",
    "MissingDependencyError",
    "PlanWarning",
    "Recipe",
    "Report",
    "RunError",
    "SmeltError",
    "TruncationWarning",
    "__version__",
    "apply",
    "load",
    "package",
    "plan",
    "run",
    "search",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import smelt` is fast."""
    if name == "__version__":
        from importlib.metadata import version

        return version("smelt")
    if name == "Recipe":
        from smelt.api.recipes import Recipe

        return Recipe
    if name == "Report":
        from smelt.pipeline.execute.run_result import Report

        return Report
    raise AttributeError(f"module 'smelt' has no attribute '{name}'")


def run(
    recipe: str | Path | Recipe,
    *,
    overrides: Sequence[str] | Mapping[str, Any] | None = None,
    until: str | None = None,
    out: str | Path | None = None,
    store: str | Path | None = None,
    rebuild: bool | Sequence[str] = (),
    limit: int | None = None,
    executor: str | None = None,
    push_checkpoints: bool = False,
    quiet: bool = False,
) -> Result:
    """Run a recipe and return its result, as `smelt run` does.

    Args:
        recipe: a `smelt.Recipe`, a file, or the name of a recipe included in smelt (quickstart).
        overrides: settings to change: {"prune.keep_ratio": 0.5}, or a list such as ["prune.keep_ratio=0.5"].
        until: last step to run, with the steps that it needs.
        out: the run's folder (default: runs/NAME in the current folder).
        store: folder of stored artifacts (default: .store next to the run's folder), or the URL of a bucket,
            such as s3://bucket/prefix.
        rebuild: steps to build again; True for all.
        limit: use at most this many samples of every split; 1 or more.
        executor: ray or ray://HOST:PORT, to run steps as tasks of a Ray cluster.
        push_checkpoints: copy checkpoints of trainings to the bucket, so that another machine can continue.
        quiet: print nothing to standard error; the log is in the run's folder.

    Returns:
        The report (docs/reference/report.md), the run's folder and the exit code of the command: 0
        passed, 1 a step failed, 3 a gate failed, 4 the remote store lacks results, 130 interrupted.

    Raises:
        InputError: the recipe, the data or the machine is not suitable; nothing was written.
    """
    import warnings

    from smelt.api.recipes import plan_recipe
    from smelt.pipeline.execute.run import RunOptions, run_plan
    from smelt.pipeline.execute.run_folder import store_place

    plan = plan_recipe(recipe, _override_list(overrides), until)
    for message in () if quiet else plan.warnings:
        warnings.warn(PlanWarning(message), stacklevel=2)
    again = ["*"] if rebuild is True else _as_list(rebuild or ())
    options = RunOptions(
        out=None if out is None else Path(out),
        store=None if store is None else store_place(store),
        rebuild=frozenset(again),
        limit=limit,
        quiet=quiet,
        executor=executor,
        push_checkpoints=push_checkpoints,
    )
    return run_plan(plan, options)


def plan(
    recipe: str | Path | Recipe,
    *,
    overrides: Sequence[str] | Mapping[str, Any] | None = None,
    until: str | None = None,
) -> Plan:
    """Check a recipe and return its plan, as `smelt plan` does.

    Args:
        recipe: a `smelt.Recipe`, a file, or the name of a recipe included in smelt (quickstart).
        overrides: settings to change, as for `smelt.run`.
        until: last step to run, with the steps that it needs.

    Returns:
        The plan: its `steps`, `gates`, `warnings`; `str(plan)` is the output of `smelt plan`.

    Raises:
        InputError: there are errors in the recipe, the model's folder or the data; lists all of them.
    """
    from smelt.api.recipes import plan_recipe

    return plan_recipe(recipe, _override_list(overrides), until)


def shrink(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    *,
    target: str | Sequence[str] = (),
    max_degradation: str | Sequence[str] = (),
    time_limit_minutes: float = 30.0,
    task: str | None = None,
    out: str | Path | None = None,
    store: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Make a model smaller or faster, as `smelt shrink` does, and return the report of the search.

    Args:
        model: a folder or a hub id.
        data: a folder with train, validation and test, or files.
        target: "2x faster", "4x smaller", "at most 20 MB", or several (default: as fast as possible).
        max_degradation: the largest loss, such as "bleu 0.5" (default: 1 point of the main metric).
        time_limit_minutes: time for the search.
        task: task, if the model's family supports several.
        out: the folder (default: runs/NAME-shrink). The same call in the same folder goes on.
        store: folder of stored artifacts, or the URL of a bucket.
        quiet: print nothing.

    Returns:
        The content of search.json: `front` with the best trials, empty where the target cannot be met; then
        `nearest` is the trial that comes closest.

    Raises:
        InputError: target, model or data are not suitable, or the folder has another search.
        RunError: all of the first trials failed.
    """
    from smelt.pipeline.execute.display import print_progress
    from smelt.pipeline.execute.run_folder import store_place
    from smelt.pipeline.search.shrink import ShrinkOptions
    from smelt.pipeline.search.shrink import shrink as run_shrink

    files = [data] if isinstance(data, str | Path) else data
    options = ShrinkOptions(
        targets=(target,) if isinstance(target, str) else tuple(target),
        max_degradations=(max_degradation,) if isinstance(max_degradation, str) else tuple(max_degradation),
        time_limit_minutes=time_limit_minutes,
        task=task,  # type: ignore[arg-type]
        out=None if out is None else Path(out),
        store=None if store is None else store_place(store),
    )
    report, _ = run_shrink(
        str(model), [Path(file) for file in files], options, None if quiet else print_progress
    )
    return report


def search(
    recipe: str | Path,
    *,
    overrides: Sequence[str] | Mapping[str, Any] | None = None,
    trials: int | None = None,
    time_limit_minutes: float | None = None,
    sampler: str | None = None,
    out: str | Path | None = None,
    store: str | Path | None = None,
    storage: str | None = None,
    limit: int | None = None,
    executor: str | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Search the space of a recipe and return the report, as `smelt search` does.

    Args:
        recipe: a file with `{search: ...}` in its settings and a key `search`.
        overrides: settings to change, as for `smelt.run`.
        trials: trials at most, of all workers (default: the recipe's, else 50).
        time_limit_minutes: time limit; a running trial ends after its current step, the first is finished.
        sampler: tpe, nsga2, random or grid (default: by the number of objectives).
        out: the search's folder (default: runs/NAME-search). A search in the same folder is continued.
        store: folder of stored artifacts, or the URL of a bucket.
        storage: URL of the study's database (default: a file in `out`).
        limit: use at most this many samples of every split.
        executor: ray or ray://HOST:PORT, to run trials at once on a Ray cluster.
        quiet: print nothing.

    Returns:
        The content of search.json: `front` with the best trials, `trials`, `nearest`, `importances`.

    Raises:
        InputError: the recipe or the space has errors, or the study belongs to another recipe.
        RunError: all of the first trials failed.
    """
    from smelt.pipeline.execute.display import print_progress
    from smelt.pipeline.execute.run_folder import store_place
    from smelt.pipeline.search.report import finish_search
    from smelt.pipeline.search.space import read_space
    from smelt.pipeline.search.study import Search, SearchOptions

    options = SearchOptions(
        out=None if out is None else Path(out),
        store=None if store is None else store_place(store),
        trials=trials,
        time_limit_minutes=time_limit_minutes,
        storage=storage,
        sampler=sampler,  # type: ignore[arg-type]
        limit=limit,
        executor=executor,
    )
    job = Search(read_space(recipe, _override_list(overrides)), options)
    job.check()
    ended = job.run(None if quiet else print_progress)
    return finish_search(job, ended)


def apply(
    stage: str,
    model: str | Path,
    *,
    out: str | Path,
    data: str | Path | Mapping[str, Any] | None = None,
    task: Task | None = None,
    seed: int = 0,
    threads: int | None = None,
    device: str = "auto",
    **settings: Any,
) -> Artifact:
    """Run one stage on a model, without scoring, and return the artifact.

        smelt.apply("quantize", "models/my", out="my-int4", scheme="int4", method="gptq", data="rows.jsonl")
        smelt.apply("onnx", "my-int4", out="my-onnx", target="ort-cpu")

    Args:
        stage: the name of a stage; `smelt stages` lists them.
        model: a model's folder, a hub id, an .onnx file, or the folder of a torch artifact.
        out: the folder to write; it must not exist, or be empty.
        data: a mapping as `data` in a recipe, or one file with samples for training or calibration.
        task: task of the model (default: inferred from its config).
        seed: random seed.
        threads: CPU threads.
        device: auto, cpu or cuda.
        **settings: settings of the stage; `smelt stages NAME` lists them.

    Returns:
        The artifact: its `path`, and its `manifest` with `warnings` and `details`.

    Raises:
        InputError: settings, model, data or machine are not suitable; nothing was written.
        RunError: the stage failed; nothing was written.
    """
    from smelt.api.recipes import apply_stage

    return apply_stage(stage, model, out, data, task, seed, threads, device, settings)


def load(
    artifact: str | Path,
    *,
    threads: int | None = None,
    device: str = "auto",
    trust_engine: bool = False,
    workers: int = 1,
) -> Model:
    """Load an artifact in its runtime: torch, ONNX Runtime, OpenVINO or TensorRT.

        with smelt.load("runs/translate/artifacts/onnx-int8") as model:
            print(model.generate(["A man is riding a bicycle."]))

    Args:
        artifact: the folder of an artifact.
        threads: CPU threads (default: the artifact's setting, else the runtime's default).
        device: auto, cpu or cuda.
        trust_engine: allow TensorRT engines that this user did not build on this machine. An engine is native
            code; open only those from trusted sources.
        workers: number of batches of one call that run at the same time, each with `threads` threads.

    Returns:
        A context manager with `generate` (texts) or `predict` (classes); see `smelt.api.load.Model`.

    Raises:
        InputError: the folder is not an artifact, or its files were changed.
    """
    from smelt.api.load import Model

    return Model(artifact, threads, device, trust_engine, workers)


def package(
    artifact: str | Path, format: str = "standalone", out: str | Path | None = None
) -> WrittenPackage:
    """Write an artifact as a self-contained folder for deployment, as `smelt package` does.

    Args:
        artifact: the folder of an artifact.
        format: layout; `smelt package --help` lists the formats.
        out: the folder to write (default: NAME-FORMAT in the current folder).

    Returns:
        The package: its `folder`, `usage`, `size_bytes`, `warnings`.

    Raises:
        InputError: no such artifact or format, the format does not support it, or `out` cannot be written.
        RunError: the disk is full, or the package failed its checks; nothing was written.
    """
    from smelt.api.package import package_artifact

    return package_artifact(artifact, format, out)


def _override_list(overrides: Sequence[str] | Mapping[str, Any] | None) -> list[str]:
    """Return overrides in the form of `--set`.

    Raises:
        InputError: a value is not valid in a recipe, or a list contains something other than strings.
    """
    import json

    from smelt.api.recipes import to_plain

    if isinstance(overrides, Mapping):
        values = {str(name): to_plain(value, (str(name),)) for name, value in overrides.items()}
        return [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    changes = _as_list(overrides or ())
    for change in changes:
        if not isinstance(change, str):
            raise InputError(
                f"overrides: expected a mapping, or a list of strings such as 'seed=3', got {change!r}.",
                code="wrong-value",
                setting="overrides",
            )
    return changes


def _as_list(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
