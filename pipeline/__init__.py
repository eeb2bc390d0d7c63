"""smelt makes trained transformers small and fast, one measured stage at a time.

In Python: `smelt.run("recipe.yaml")` carries a recipe out, `smelt.load(folder)` opens an artifact,
`smelt.package(folder)` writes it as a folder to ship. They import what they need when they are called;
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
    from smelt.execute.run_result import Result
    from smelt.export.package.write import Package
    from smelt.use.loaded import Model

__all__ = [
    "DeviceWarning",
    "InputError",
    "MissingDependencyError",
    "RunError",
    "SmeltError",
    "TruncationWarning",
    "load",
    "package",
    "run",
]


def run(
    recipe: str | Path,
    *,
    set: Sequence[str] | Mapping[str, Any] = (),
    until: str | None = None,
    out: str | Path | None = None,
    store: str | Path | None = None,
    fresh: bool | Sequence[str] = (),
    limit: int | None = None,
    quiet: bool = False,
) -> Result:
    """Carry out a recipe, as `smelt run` does.

    Args:
        recipe: a file, or the name of a recipe that ships (quickstart).
        set: settings to change: {"prune.keep": 0.5}, or texts as the command line takes them.
        until: stop after this step and what it needs.
        out: the run's folder (default: runs/NAME below the current folder).
        store: where artifacts are kept (default: .store beside the run's folder).
        fresh: steps to build anew; True for all.
        limit: use so many rows of every split; 1 or more.
        quiet: say nothing on standard error; the log in the run's folder says it all.

    Returns:
        The report (docs/report.md), the run's folder and the exit code that the command would give: 0
        passed, 1 a step failed, 3 a gate failed, 130 interrupted.

    Raises:
        InputError: what can be known before any work starts; nothing was written.
    """
    import json
    import warnings

    from smelt.execute.run import Options, run_plan
    from smelt.plan.load import load_plan

    changes = [f"{k}={json.dumps(v)}" for k, v in set.items()] if isinstance(set, Mapping) else _list(set)
    plan = load_plan(recipe, changes, until)
    for message in () if quiet else plan.warnings:
        warnings.warn(str(message), stacklevel=2)
    anew = ["*"] if fresh is True else _list(fresh or ())
    options = Options(
        out=None if out is None else Path(out),
        store=None if store is None else Path(store),
        fresh=frozenset(anew),
        limit=limit,
        quiet=quiet,
    )
    return run_plan(plan, options)


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


def package(artifact: str | Path, form: str = "standalone", out: str | Path | None = None) -> Package:
    """Write an artifact as a folder of real files that others can open, as `smelt package` does.

    Args:
        artifact: the folder of an artifact.
        form: what for; `smelt package --help` lists the forms.
        out: the folder to write (default: NAME-FORM in the current folder).

    Returns:
        The package: its `folder`, `how` it is used, `size_bytes`.

    Raises:
        InputError: no such artifact or form, the form does not take it, or `out` cannot be written.
        RunError: the disk is full, or what was made is not right; nothing is left behind.
    """
    from smelt.use.package import package_artifact

    return package_artifact(artifact, form, out)


def _list(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
