"""Write a package: the parts common to all formats."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from smelt.core.artifact import CHECKSUMS_FILE, MANIFEST, Artifact, FileRecord, is_ignorable_file
from smelt.core.files import folder_size, sha256_of, write_json
from smelt.core.messages import Message
from smelt.export.package.atomic_folder import atomic_folder
from smelt.export.package.package_format import PackageFormat, PackageOrigin, UsageNotes
from smelt.export.package.readme import make_readme

README_FILE = "README.md"


@dataclass(frozen=True)
class WrittenPackage:
    """A written package.

    folder: its path. usage: how it is used. size_bytes: of all its files. warnings: reasons against using it.
    """

    folder: Path
    usage: UsageNotes
    size_bytes: int
    warnings: tuple[Message, ...] = ()


def write_package(
    package_format: PackageFormat, artifact: Artifact, origin: PackageOrigin, out: Path
) -> WrittenPackage:
    """Write `artifact`, which `package_format` supports, into the new folder `out`, completely or not at all.

    Raises:
        InputError: `out` exists and is not empty, or cannot be written; or the artifact does not fit.
        RunError: the disk is full, or the result is not correct.
    """
    with atomic_folder(out) as folder:
        how = package_format.write(artifact, origin, folder)
        text = make_readme(package_format, artifact, origin, how, folder, out.absolute().name)
        (folder / README_FILE).write_text(text, encoding="utf-8")
        if package_format.is_artifact:
            _write_manifest(artifact, folder)
        _write_checksums(folder)
        size = folder_size(folder)
    return WrittenPackage(out, how, size, origin.warnings)


def copy_artifact(artifact: Artifact, folder: Path) -> None:
    """Copy the model's files in `artifact`, without the manifest, into `folder`, as regular files."""
    for name in artifact.model_files:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(artifact.path / name, target)


def _package_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _write_manifest(artifact: Artifact, folder: Path) -> None:
    """Write a manifest, so that the package is an artifact; it lists the files that are loaded.

    Files that a user may edit (README.md, infer.py) are not listed, so that changes to them are allowed.
    """
    inside = {path.relative_to(folder): path for path in _package_files(folder)}
    files = {
        name.as_posix(): FileRecord(sha256=sha256_of(path), size_bytes=path.stat().st_size)
        for name, path in inside.items()
        if not is_ignorable_file(name)
    }
    write_json(folder / MANIFEST, artifact.manifest.model_copy(update={"files": files}).model_dump())


def _write_checksums(folder: Path) -> None:
    """Write the SHA-256 of every file as `sha256sum` does."""
    lines = [f"{sha256_of(path)}  {path.relative_to(folder).as_posix()}\n" for path in _package_files(folder)]
    (folder / CHECKSUMS_FILE).write_bytes("".join(lines).encode())
