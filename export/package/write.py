"""Writing a package: what is the same around every form."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from smelt.core.artifact import MANIFEST, SUMS, Artifact, FileRecord, is_harmless
from smelt.core.files import sha256_of, size_of, write_json
from smelt.core.messages import Message
from smelt.export.package.form import Form, HowTo, Origin
from smelt.export.package.new_folder import new_folder
from smelt.export.package.readme import readme

README = "README.md"


@dataclass(frozen=True)
class Package:
    """A package that was written.

    folder: where. how: how it is used. size_bytes: of all its files. doubts: what speaks against using it.
    """

    folder: Path
    how: HowTo
    size_bytes: int
    doubts: tuple[Message, ...] = ()


def write_package(form: Form, artifact: Artifact, origin: Origin, out: Path) -> Package:
    """Write `artifact`, which `form` takes, into the folder `out`, which is complete after it or absent.

    Raises:
        InputError: `out` is there and not empty, or must not be written; or the form cannot do it after all.
        RunError: the disk is full, or what was made is not right.
    """
    with new_folder(out) as folder:
        how = form.write(artifact, origin, folder)
        text = readme(form, artifact, origin, how, folder, out.absolute().name)
        (folder / README).write_text(text, encoding="utf-8")
        if form.keeps:
            _write_manifest(artifact, folder)
        _write_sums(folder)
        size = size_of(folder)
    return Package(out, how, size, origin.doubts)


def copy_artifact(artifact: Artifact, folder: Path) -> None:
    """Copy the model's files in `artifact`, without the manifest, into `folder`, as files of their own."""
    for name in artifact.model_files:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(artifact.path / name, target)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _write_manifest(artifact: Artifact, folder: Path) -> None:
    """Write a manifest, so that the package is an artifact: its files, but those that nothing loads.

    What a user may edit (README.md, infer.py) is not listed; so a change to it breaks nothing.
    """
    inside = {path.relative_to(folder): path for path in _files(folder)}
    files = {
        name.as_posix(): FileRecord(sha256=sha256_of(path), size_bytes=path.stat().st_size)
        for name, path in inside.items()
        if not is_harmless(name)
    }
    write_json(folder / MANIFEST, artifact.manifest.model_copy(update={"files": files}).model_dump())


def _write_sums(folder: Path) -> None:
    """Write the SHA-256 of every file as `sha256sum` does."""
    lines = [f"{sha256_of(path)}  {path.relative_to(folder).as_posix()}\n" for path in _files(folder)]
    (folder / SUMS).write_bytes("".join(lines).encode())
