"""Write an artifact as a self-contained folder, for `smelt package`."""

from __future__ import annotations

import os
import shlex
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from smelt.api.package_origin import find_run, package_origin, run_artifacts
from smelt.core.artifact import Artifact, read_artifact
from smelt.core.data import CUSTOM_TASK
from smelt.core.errors import InputError
from smelt.runtime.third_party.artifact_safety import require_safe_artifact

if TYPE_CHECKING:
    from smelt.export.package.write_package import WrittenPackage

_KEY_DIGITS = 12  # digits of a key


def package_artifact(
    source: str | PathLike[str], format: str = "standalone", out: str | PathLike[str] | None = None
) -> WrittenPackage:
    """Write the artifact `source` as a package in `format`.

    Args:
        source: the folder of an artifact: in a run (runs/x/artifacts/NAME), in a store, or a copy.
        format: layout; see `smelt package --help`.
        out: the folder to write (default: NAME-FORMAT in the current folder).

    Raises:
        InputError: no such artifact or format, the format does not support it, or `out` cannot be written.
        RunError: the disk is full, or the package failed its checks.
    """
    from smelt.export.package.atomic_folder import require_empty_destination
    from smelt.export.package.check_support import require_supported
    from smelt.export.package.registry import PACKAGE_FORMATS, find_package_format
    from smelt.export.package.write_package import write_package

    if out is not None and not os.fspath(out).strip():
        raise InputError("--out: empty. Set it to the folder to write, or remove --out.", code="empty-text")
    path, chosen = Path(source).expanduser(), find_package_format(format)
    artifact = read_artifact(path)
    if artifact.manifest.task == CUSTOM_TASK:
        raise InputError(
            f"{source}: an artifact for task: {CUSTOM_TASK} needs no package; ONNX Runtime opens its"
            f" model.onnx directly. Copy the folder: cp -rL {shlex.quote(str(source))} NEW",
            code="nothing-to-do",
        )
    run = find_run(path, artifact)
    others = {} if run is None else {n: a for n, a in run_artifacts(run[0]).items() if n != run[1]}
    require_supported(chosen, artifact, str(source), PACKAGE_FORMATS.values(), others)
    name = path.absolute().name if run is None else run[1]
    name = name[:_KEY_DIGITS] if name == artifact.key else name
    folder = Path(f"{name}-{format}") if out is None else Path(out).expanduser()
    require_empty_destination(folder)
    _require_outside(folder, artifact)
    artifact.verify()
    require_safe_artifact(artifact, trust_engine=True)  # an engine is copied, not run
    origin = package_origin(artifact, None if run is None else run[0], name)
    return write_package(chosen, artifact, origin, folder)


def package_lines(package: WrittenPackage) -> list[str]:
    """Return the output of `smelt package`: the folder, its size, and how to install and run it."""
    folder = shlex.quote(str(package.folder))
    return [
        f"Wrote {package.folder} ({package.size_bytes:,} bytes). See its README.md for how to use it.",
        f"Install its requirements: (cd {folder} && {package.usage.install})",
        f"Run it: (cd {folder} && {package.usage.run})",
        *(f"warning: {doubt}" for doubt in package.warnings),
    ]


def _require_outside(folder: Path, artifact: Artifact) -> None:
    """Require that the package is not written inside an artifact or a run's artifacts.

    Raises:
        InputError: it would become a part of an artifact, or the next run would remove it.
    """
    place = folder.absolute()
    if place.resolve().is_relative_to(artifact.path):
        raise InputError(
            f"{folder}: inside the artifact itself. Choose another --out.",
            code="inside-artifact",
            file=str(folder),
        )
    if place.parent.name == "artifacts" and (place.parent.parent / "recipe.yaml").is_file():
        raise InputError(
            f"{folder}: the next run in {place.parent.parent} would remove it from 'artifacts'. Choose"
            " another --out.",
            code="inside-run",
            file=str(folder),
        )
