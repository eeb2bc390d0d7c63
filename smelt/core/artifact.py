"""The artifact that stages pass on: a complete directory with a manifest."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from smelt.core.errors import InputError
from smelt.core.files import (
    MANIFEST,
    is_artifact_file,
    load_json,
    sha256_of,
    verified_content,
    without_hash,
    write_hashed_json,
)
from smelt.core.messages import Message, messages_to_json

Format = Literal["torch", "onnx", "tensorrt"]
# Float master weights of a quantized model that was trained: a later training starts from them
# (compress/quantize/qat.py). They are not part of the model.
MASTER_WEIGHTS_FILE = "latent.safetensors"
ADAPTER_FOLDER = "adapter"  # adapters as peft's files, whose sum with the weights is the model
CHECKSUMS_FILE = "SHA256SUMS"  # of a package (export/package): the hash of every file in it
_REBUILD_HINT = "Run the recipe again with --rebuild."
_COPY_HINT = (
    f"Copy the package again, or write it again with `smelt package` ({CHECKSUMS_FILE} lists its files)."
)
# A manifest lists a few dozen files and details of a stage; a larger file is no manifest.
_MAX_MANIFEST_BYTES = 64_000_000
# Files that a manifest need not list, because nothing reads them as part of a model. In addition: hidden
# names, which systems and tools create (.DS_Store, ._model.onnx, .nfs0001, .git, .cache), *.md, and files of
# a package (export/package) that its user may change.
_SYSTEM_FILES = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"})
_NOTES_PATTERN = re.compile(r"(readme|licen[sc]e|notice|copying)(\.(txt|rst))?|.*\.md", re.IGNORECASE)
_PYCACHE = "__pycache__"  # created by Python when a package's infer.py is imported
_PACKAGED_PATTERN, _README_CHARACTERS = re.compile(r"packaged by smelt as `([\w.-]{1,40})`"), 20_000
_CPP_FOLDER = "cpp"  # a package's example, and what a user builds there
_PACKAGE_FILES = frozenset(
    {
        "infer.py", "serve.py", "infer.json", "requirements.txt", "requirements-serve.txt", "Dockerfile",
        CHECKSUMS_FILE,
    }
)  # fmt: skip


class FileRecord(BaseModel):
    """Size and SHA-256 of one file of an artifact."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")  # it is part of paths in remote stores
    size_bytes: int = Field(ge=0)


class StepRecord(BaseModel):
    """The measured time and memory of a step, by which other steps of the kind are predicted.

    kind: the stage, and its method or target. machine, threads: where it ran. memory_bytes: the peak of the
    process; None: not measured. estimated_memory_bytes: of weights, gradients and optimizer states, without
    the interpreter. work: what the time is proportional to (`smelt.models.model_size.StepSize`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str
    machine: str
    threads: int
    seconds: float
    memory_bytes: int | None
    estimated_memory_bytes: int
    work: float = Field(gt=0)


class Manifest(BaseModel):
    """The metadata of an artifact, in `manifest.json`.

    `details` holds measurements of the stage for the report: `parameters` (count), `target`,
    `dtype`, `parity` and other details of the technique.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[3] = 3
    key: str
    format: Format
    task: str
    stage: str
    settings: dict[str, Any]
    seed: int
    parent: str | None
    versions: dict[str, str]
    files: dict[str, FileRecord] = Field(default_factory=dict)
    details: dict[str, Any] = Field(default_factory=dict)
    warnings: Annotated[list[Message], PlainSerializer(messages_to_json)] = Field(default_factory=list)
    seconds: float = 0.0
    record: StepRecord | None = None


@dataclass(frozen=True)
class Artifact:
    """A directory that one stage wrote, with its manifest."""

    path: Path
    manifest: Manifest

    @property
    def key(self) -> str:
        """The artifact's key: 64 hexadecimal digits."""
        return self.manifest.key

    @property
    def format(self) -> Format:
        """The format of the model: torch, onnx or tensorrt."""
        return self.manifest.format

    @property
    def model_files(self) -> dict[str, FileRecord]:
        """The files of the model itself, which are deployed: without master weights and adapters."""
        others = (MASTER_WEIGHTS_FILE, f"{ADAPTER_FOLDER}/")
        return {name: record for name, record in self.manifest.files.items() if not name.startswith(others)}

    @property
    def size_bytes(self) -> int:
        """The size in bytes of weights, graphs and engines, without the tokenizer's files."""
        suffixes = (".safetensors", ".onnx", ".data", ".onnx_data", ".plan")
        return sum(r.size_bytes for n, r in self.model_files.items() if n.endswith(suffixes))

    def verify(self, hint: str | None = None) -> None:
        """Compare every file with its recorded size and hash.

        Args:
            hint: how to repair it, the end of the message; None: the text for a run, or a package.

        Raises:
            InputError: a file is missing or its bytes have changed.
        """
        hint = hint or _repair_hint(self.path)
        for name, record in self.manifest.files.items():
            path = self.path / name
            try:
                exists = path.is_file()
                is_intact = (
                    exists and path.stat().st_size == record.size_bytes and sha256_of(path) == record.sha256
                )
            except (OSError, ValueError) as error:  # unreadable, or an invalid file name
                raise InputError(
                    f"{path}: cannot be read: {error}. {hint}", code="unreadable-file"
                ) from error
            if not exists:
                raise InputError(f"{path}: this file of the artifact is missing. {hint}", code="missing-file")
            if not is_intact:
                raise InputError(
                    f"{path}: the file has been modified since it was written. {hint}", code="changed-file"
                )


def _repair_hint(path: Path) -> str:
    """Return how to repair a damaged file of the artifact in `path`: a package, or of a run."""
    return _COPY_HINT if (path / CHECKSUMS_FILE).is_file() else _REBUILD_HINT


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest` with the hash of its content to the artifact's folder."""
    write_hashed_json(folder / MANIFEST, manifest.model_dump())


def read_artifact(path: Path, hint: str | None = None) -> Artifact:
    """Return the artifact in the folder `path`. hint: how to repair it; None: as for `Artifact.verify`.

    Raises:
        InputError: there is no such folder, no manifest, the manifest cannot be read or was modified, a file
            is outside of the folder, or the folder has a file that the manifest does not list and that could
            be read as part of the model (all but hidden files, system files, and notes such as README.md).
    """
    if (link_problem := broken_link_problem(path)) is not None:
        raise InputError(f"{path}: {link_problem[1]}", code=link_problem[0])
    path = path.resolve()
    manifest = read_manifest(path, hint)
    for unexpected_path, code, problem in unexpected_files(path, manifest):
        raise InputError(f"{unexpected_path}: {problem}", code=code)
    return Artifact(path, manifest)


def broken_link_problem(path: Path) -> tuple[str, str] | None:
    """Return code and text of the problem if `path` is a run's link to an artifact that is missing."""
    if not path.is_symlink() or path.exists():
        return None
    target, run = Path(os.path.realpath(path)), path.absolute().parent.parent
    store, rebuild = target.parent.parent, f"run its recipe again with --out {shlex.quote(str(run))}"
    if store.is_dir():
        return (
            "removed-artifact",
            f"this artifact was removed from the store in {store}. To build it, {rebuild}.",
        )
    return "moved-run", (
        f"a link to the store in {store}, which does not exist: the run was moved or copied without its"
        f" store. Move it back, copy the store there, or {rebuild} --store STORE, the store that it was made"
        " with: artifacts that are in it are not built again."
    )


def default_threads(manifest: Manifest) -> int | None:
    """Return the default number of threads of the artifact; None if it has none."""
    threads = manifest.details.get("threads")
    return threads if isinstance(threads, int) and threads >= 1 else None


def _run_hint(path: Path) -> str:
    """Return a hint about the artifacts if `path` is the folder of a run, else ""."""
    manifests = sorted(path.glob(f"artifacts/*/{MANIFEST}"))
    if not manifests:
        return ""
    names = ", ".join(file.parent.name for file in manifests)
    return f" It is the folder of a run; its artifacts are in {path / 'artifacts'}: {names}."


def _package_hint(path: Path) -> str:
    """Return a hint about the package format if `path` is a package for other software, else ""."""
    try:
        with (path / "README.md").open(encoding="utf-8") as stream:
            match = _PACKAGED_PATTERN.search(stream.read(_README_CHARACTERS))
    except (OSError, ValueError):
        return ""
    if match is None or not (path / CHECKSUMS_FILE).is_file():
        return ""
    return (
        f" It is a package of the format '{match[1]}' for other software (see its README.md). smelt opens"
        " packages of the formats standalone and huggingface, and the artifact that it was made from."
    )


def _model_hint(path: Path) -> str:
    """Return how to make an artifact if `path` is a model's folder, else ""."""
    if not (path / "config.json").is_file():
        return ""
    return (
        f" It looks like a model folder: `smelt init {path}` writes a recipe; its run makes artifacts, also"
        " of"
        " the unchanged model."
    )


def read_manifest(path: Path, hint: str | None = None) -> Manifest:
    """Return the manifest of the artifact in the folder `path`; other files are not checked.

    hint: how to repair it; None: as for `Artifact.verify`.

    Raises:
        InputError: there is no such folder, no manifest, the manifest cannot be read or was modified, or it
            lists a file outside of the folder.
    """
    file = path / MANIFEST
    if not path.is_dir():
        raise InputError(
            f"{path}: no such folder. An artifact is a folder such as runs/x/artifacts/onnx.",
            code="missing-folder",
        )
    if not file.is_file():
        missing = f"no {MANIFEST} in this folder, so it is not a smelt artifact."
        raise InputError(
            f"{path}: {missing}{_run_hint(path)}{_package_hint(path) or _model_hint(path)}",
            code="not-an-artifact",
        )
    try:
        if file.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ValueError(f"it is larger than {_MAX_MANIFEST_BYTES:,} bytes")
        content = load_json(file)
        manifest = Manifest.model_validate(without_hash(content))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{file}: not a manifest that this version of smelt can read: {error}", code="damaged-manifest"
        ) from error
    for name in manifest.files:
        if not _is_inside(name):
            raise InputError(
                f"{file}: the file name {name!r} points outside the artifact.", code="path-outside-folder"
            )
        if not is_artifact_file(name):
            raise InputError(
                f"{file}: lists {name[:200]!r}, which is not a weight, graph, tokenizer or settings"
                " file and could contain code. Remove the file, or do not use this artifact.",
                code="unknown-file",
            )
    try:
        verified_content(content)
    except ValueError as error:
        raise InputError(
            f"{file}: the manifest is damaged: {error}. {hint or _repair_hint(path)}", code="changed-manifest"
        ) from error
    return manifest


def _is_inside(name: str) -> bool:
    """Return whether `name` is a relative path inside the folder, on any system."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    absolute = PurePosixPath(name).is_absolute() or bool(PureWindowsPath(name).drive)
    return bool(parts) and ".." not in parts and not absolute and "\0" not in name


def unexpected_files(folder: Path, manifest: Manifest) -> Iterator[tuple[Path, str, str]]:
    """Yield files that do not belong to the artifact and could be harmful, with code and text of the error.

    These are links that point outside of the folder, and files that the manifest does not list.
    """
    expected_files = {MANIFEST, *manifest.files}
    for folder_path, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(folder_path, name)
            relative_path = path.relative_to(folder)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(folder):
                target = os.readlink(path)
                yield (
                    path,
                    "path-outside-folder",
                    f"a link to {target}, which points outside of the artifact. Copy the file there instead.",
                )
            elif (
                name in files
                and relative_path.as_posix() not in expected_files
                and not is_ignorable_file(relative_path)
            ):
                yield (
                    path,
                    "unknown-file",
                    f"this file does not belong to the artifact: {MANIFEST} does not list it, and it could"
                    " be read as"
                    " part of the model. Remove it or move it elsewhere.",
                )


def is_ignorable_file(relative_path: Path) -> bool:
    """Return whether the file, by its relative name, is never read as part of a model."""
    if relative_path.as_posix() in _PACKAGE_FILES or relative_path.parts[:1] == (_CPP_FOLDER,):
        return True
    if any(p.startswith(".") or p == _PYCACHE for p in relative_path.parts):
        return True
    return (
        relative_path.name.lower() in _SYSTEM_FILES
        or _NOTES_PATTERN.fullmatch(relative_path.name) is not None
    )
