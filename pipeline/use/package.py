"""`smelt package`: an artifact as a folder that leaves the house."""

from __future__ import annotations

import os
import shlex
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from smelt.core.artifact import Artifact, read_artifact
from smelt.core.data import CUSTOM
from smelt.core.errors import InputError
from smelt.runtime.foreign.tried import require_safe
from smelt.use.package_origin import artifacts_of, origin_of, run_of

if TYPE_CHECKING:
    from smelt.export.package.write import Package

_SHORT = 12  # digits of a key


def package_artifact(
    given: str | PathLike[str], form: str = "standalone", out: str | PathLike[str] | None = None
) -> Package:
    """Write the artifact `given` as a package of the form `form`.

    Args:
        given: the folder of an artifact: of a run (runs/x/artifacts/NAME), of a store, or a copy of one.
        form: see `smelt package --help`.
        out: the folder to write (default: NAME-FORM in the current folder).

    Raises:
        InputError: no such artifact or form, the form does not take it, or `out` cannot be written.
        RunError: the disk is full, or what was made is not right.
    """
    from smelt.export.package.fit import require_fit
    from smelt.export.package.new_folder import require_free
    from smelt.export.package.registry import FORMS, find_form
    from smelt.export.package.write import write_package

    if out is not None and not os.fspath(out).strip():
        raise InputError(
            "--out: it is empty. Name the folder to write, or leave --out away.", code="empty-text"
        )
    path, chosen = Path(given).expanduser(), find_form(form)
    artifact = read_artifact(path)
    if artifact.manifest.task == CUSTOM:
        raise InputError(
            f"{given}: a graph of arrays needs no package: ONNX Runtime opens its model.onnx as it is. Copy"
            f" the folder: cp -rL {shlex.quote(str(given))} NEW",
            code="nothing-to-do",
        )
    run = run_of(path, artifact)
    others = {} if run is None else {n: a for n, a in artifacts_of(run[0]).items() if n != run[1]}
    require_fit(chosen, artifact, str(given), FORMS.values(), others)
    name = path.absolute().name if run is None else run[1]
    name = name[:_SHORT] if name == artifact.key else name
    folder = Path(f"{name}-{form}") if out is None else Path(out).expanduser()
    require_free(folder)
    _require_outside(folder, artifact)
    artifact.verify()
    require_safe(artifact, trust_engine=True)  # an engine is copied, not opened
    origin = origin_of(artifact, None if run is None else run[0], name)
    return write_package(chosen, artifact, origin, folder)


def package_lines(package: Package) -> list[str]:
    """Return what the command prints of a package: where it is, its size, the line that runs it."""
    folder = shlex.quote(str(package.folder))
    return [
        f"Wrote {package.folder} ({package.size_bytes:,} bytes). Its README.md says how it is used.",
        f"Install what it needs: (cd {folder} && {package.how.install})",
        f"Run it: (cd {folder} && {package.how.run})",
        *(f"warning: {doubt}" for doubt in package.doubts),
    ]


def _require_outside(folder: Path, artifact: Artifact) -> None:
    """Require that the package is not written where artifacts are.

    Raises:
        InputError: it would become a part of an artifact, or the next run would remove it.
    """
    place = folder.absolute()
    if place.resolve().is_relative_to(artifact.path):
        raise InputError(
            f"{folder}: this is inside of the artifact itself. Give another --out.",
            code="inside-artifact",
            file=str(folder),
        )
    if place.parent.name == "artifacts" and (place.parent.parent / "recipe.yaml").is_file():
        raise InputError(
            f"{folder}: the next run in {place.parent.parent} removes what lies in its 'artifacts'. Give"
            " another --out.",
            code="inside-run",
            file=str(folder),
        )
