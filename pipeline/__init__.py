"""smelt makes trained models small and fast, one measured stage at a time.

`smelt.run(recipe)` carries out a recipe, `smelt.plan(recipe)` checks it, `smelt.Recipe` builds one in Python,
`smelt.apply(stage, model, out)` runs one stage, `smelt.load(folder)` opens an artifact,
`smelt.package(folder)` writes it as a folder to deploy. They import what they need when they are called;
importing smelt costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.errors import (
    DeviceWarning,
    InputError,
    MissingDependencyError,
    RunError,
    SmeltError,
    TruncationWarning,
)

if TYPE_CHECKING:
    from smelt.core.artifact import Artifact
    from smelt.core.data import Task
    from smelt.execute.run_result import Report, Result
    from smelt.export.package.write import Package
    from smelt.planning.plan import Plan
    from smelt.use.loaded import Model
    from smelt.use.recipes import Recipe

__all__ = [
    "DeviceWarning",
    "InputError",
    "MissingDependencyError",
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
]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: importing smelt costs nothing."""
    if name == "__version__":
        from importlib.metadata import version

        return version("smelt")
    if name == "Recipe":
        from smelt.use.recipes import Recipe

        return Recipe
    if name == "Report":
        from smelt.execute.run_result import Report

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
    quiet: bool = False,
) -> Result:
    """Run a recipe, as `smelt run` does.

    Args:
        recipe: a `smelt.Recipe`, a file, or the name of a recipe that ships (quickstart).
        overrides: settings to change: {"prune.keep_ratio": 0.5}, or texts as the command line takes them.
        until: stop after this step and what it needs.
        out: the run's folder (default: runs/NAME below the current folder).
        store: where artifacts are stored (default: .store next to the run's folder).
        rebuild: steps to build again; True for all.
        limit: use this many samples of every split; 1 or more.
        quiet: print nothing to standard error; the run's folder has the log.

    Returns:
        The report (docs/reference/report.md), the run's folder and the exit code of the command: 0
        passed, 1 a step failed, 3 a gate failed, 130 interrupted.

    Raises:
        InputError: the recipe, the data or the machine do not allow it; nothing was written.
    """
    import warnings

    from smelt.execute.run import Options, run_plan
    from smelt.use.recipes import plan_of

    plan = plan_of(recipe, _changes(overrides), until)
    for message in () if quiet else plan.warnings:
        warnings.warn(str(message), stacklevel=2)
    again = ["*"] if rebuild is True else _list(rebuild or ())
    options = Options(
        out=None if out is None else Path(out),
        store=None if store is None else Path(store),
        rebuild=frozenset(again),
        limit=limit,
        quiet=quiet,
    )
    return run_plan(plan, options)


def plan(
    recipe: str | Path | Recipe,
    *,
    overrides: Sequence[str] | Mapping[str, Any] | None = None,
    until: str | None = None,
) -> Plan:
    """Check a recipe, as `smelt plan` does, and return what would be done.

    Args:
        recipe: a `smelt.Recipe`, a file, or the name of a recipe that ships (quickstart).
        overrides: settings to change, as for `smelt.run`.
        until: stop after this step and what it needs.

    Returns:
        The plan: its `steps`, `gates`, `warnings`; `str(plan)` is the text that `smelt plan` prints.

    Raises:
        InputError: every mistake in the recipe, the model's folder and the data.
    """
    from smelt.use.recipes import plan_of

    return plan_of(recipe, _changes(overrides), until)


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
    """Run one stage on a model, without scoring it.

        smelt.apply("quantize", "models/my", out="my-int4", scheme="int4", method="gptq", data="rows.jsonl")
        smelt.apply("onnx", "my-int4", out="my-onnx", target="ort-cpu")

    Args:
        stage: the name of a stage; `smelt stages` lists them.
        model: a model's folder, a hub id, an .onnx file, or the folder of a torch artifact.
        out: the folder to write; it must not exist, or be empty.
        data: the data of a recipe by split, or one file, which is what the stage trains or calibrates on.
        task: of the model (default: what its config says).
        seed: of what is random.
        threads: processor threads.
        device: auto, cpu or cuda.
        **settings: of the stage; `smelt stages NAME` lists them.

    Returns:
        The artifact: its `path`, and its `manifest` with `warnings` and `details`.

    Raises:
        InputError: the recipe, the data or the machine do not allow it; nothing was written.
        RunError: the stage failed; nothing was written.
    """
    from smelt.use.apply import apply_stage

    return apply_stage(stage, model, out, data, task, seed, threads, device, settings)


def load(
    artifact: str | Path, *, threads: int | None = None, device: str = "auto", trust_engine: bool = False
) -> Model:
    """Open an artifact in its runtime: torch, ONNX Runtime, OpenVINO or TensorRT.

        with smelt.load("runs/translate/artifacts/onnx-int8") as model:
            print(model.generate(["A man is riding a bicycle."]))

    Args:
        artifact: the folder of an artifact.
        threads: processor threads (default: those that the artifact names, else the runtime's choice).
        device: auto, cpu or cuda.
        trust_engine: open a TensorRT engine that was not built here by this user. An engine is native code:
            only where you trust who made it.

    Returns:
        A context manager with `generate` (texts) or `predict` (classes); see `smelt.use.loaded.Model`.

    Raises:
        InputError: no artifact there, or its files have changed.
    """
    from smelt.use.loaded import Model

    return Model(artifact, threads, device, trust_engine)


def package(artifact: str | Path, format: str = "standalone", out: str | Path | None = None) -> Package:
    """Write an artifact as a folder of real files that others can open, as `smelt package` does.

    Args:
        artifact: the folder of an artifact.
        format: layout; `smelt package --help` lists the formats.
        out: the folder to write (default: NAME-FORMAT in the current folder).

    Returns:
        The package: its `folder`, `how` it is used, `size_bytes`.

    Raises:
        InputError: no such artifact or format, the format does not support it, or `out` cannot be written.
        RunError: the disk is full, or what was made is not right; nothing is left behind.
    """
    from smelt.use.package import package_artifact

    return package_artifact(artifact, format, out)


def _changes(overrides: Sequence[str] | Mapping[str, Any] | None) -> list[str]:
    """Return overrides as `--set` takes them.

    Raises:
        InputError: a value that no recipe can hold, or a list of other things than texts.
    """
    import json

    from smelt.use.recipes import plain

    if isinstance(overrides, Mapping):
        values = {str(name): plain(value, (str(name),)) for name, value in overrides.items()}
        return [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    changes = _list(overrides or ())
    for change in changes:
        if not isinstance(change, str):
            raise InputError(
                f"overrides: expected a mapping, or a list of texts such as 'seed=3', read {change!r}.",
                code="wrong-value",
                setting="overrides",
            )
    return changes


def _list(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
