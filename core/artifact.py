"""The one thing that passes between stages: a complete directory with a manifest."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from smelt.core.errors import InputError
from smelt.core.files import load_json, sha256_of
from smelt.core.messages import Message, as_json
from smelt.core.text import printable

Format = Literal["torch", "onnx", "tensorrt"]
MANIFEST = "manifest.json"
# The float weights behind the codes of a quantized model that was trained: a later training goes on from
# them (compress/quantize/training). They are no part of the model.
LATENTS = "latent.safetensors"
SUMS = "SHA256SUMS"  # of a package (export/package): the hash of every file in it
_REBUILD = "Run the recipe again with --rebuild to build it again."
_COPY_AGAIN = f"Copy the package again, or write it anew with `smelt package` ({SUMS} lists its files)."
# A manifest lists a few dozen files and what a stage found out; more is not one of ours.
_MAX_MANIFEST_BYTES = 64_000_000
# What a manifest need not list: nothing reads it as part of a model. Besides these: hidden names, which
# systems and tools leave behind (.DS_Store, ._model.onnx, .nfs0001, .git, .cache), *.md, and what a package
# (export/package) has for its user, who may change it.
_OF_SYSTEMS = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"})
_NOTES = re.compile(r"(readme|licen[sc]e|notice|copying)(\.(txt|rst))?|.*\.md", re.IGNORECASE)
_COMPILED = "__pycache__"  # which Python leaves where a package's infer.py is imported
_PACKAGED, _README_CHARACTERS = re.compile(r"packaged by smelt as `([\w.-]{1,40})`"), 20_000
_OF_PACKAGES = frozenset({"infer.py", "serve.py", "infer.json", "requirements.txt", "Dockerfile", SUMS})


class FileRecord(BaseModel):
    """Size and SHA-256 of one file of an artifact."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    sha256: str
    size_bytes: int


class Manifest(BaseModel):
    """What an artifact says of itself, in `manifest.json`.

    `details` holds what the stage measured and the report shows: `parameters` (count), `target`,
    `dtype`, `parity` and whatever else the technique wants to tell.
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
    warnings: Annotated[list[Message], PlainSerializer(as_json)] = Field(default_factory=list)
    seconds: float = 0.0
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Artifact:
    """A directory that one stage wrote, with its manifest."""

    path: Path
    manifest: Manifest

    @property
    def key(self) -> str:
        """The content address: 64 hexadecimal digits."""
        return self.manifest.key

    @property
    def format(self) -> Format:
        """How the model is stored: torch, onnx or tensorrt."""
        return self.manifest.format

    @property
    def model_files(self) -> dict[str, FileRecord]:
        """The files of the model itself, which leave the house: all but those that only a training reads."""
        return {name: record for name, record in self.manifest.files.items() if name != LATENTS}

    @property
    def size_bytes(self) -> int:
        """Bytes on disk of what is deployed: weights, graphs, engines; not the tokenizer's files."""
        ends = (".safetensors", ".onnx", ".data", ".onnx_data", ".plan")
        return sum(r.size_bytes for n, r in self.model_files.items() if n.endswith(ends))

    def verify(self, mend: str | None = None) -> None:
        """Compare every file with its recorded size and hash.

        Args:
            mend: how to repair it, the end of the message; None: what fits a run, or a package.

        Raises:
            InputError: a file is missing or has other bytes than when it was written.
        """
        mend = mend or (_COPY_AGAIN if (self.path / SUMS).is_file() else _REBUILD)
        for name, record in self.manifest.files.items():
            path = self.path / name
            try:
                there = path.is_file()
                same = there and path.stat().st_size == record.size_bytes and sha256_of(path) == record.sha256
            except (OSError, ValueError) as error:  # not to be read, or a name that no file can have
                raise InputError(
                    f"{path}: cannot be read: {error}. {mend}", code="unreadable-file"
                ) from error
            if not there:
                raise InputError(f"{path}: this file of the artifact is missing. {mend}", code="missing-file")
            if not same:
                raise InputError(
                    f"{path}: its bytes are not those that were written. {mend}", code="changed-file"
                )


def read_artifact(path: Path) -> Artifact:
    """Open the artifact in the folder `path`.

    Raises:
        InputError: there is no such folder, no manifest, the manifest cannot be read, a file lies outside
            of the folder, or one is there that the manifest does not list and that something could read as
            part of the model (all but hidden files, what systems leave behind, and notes such as README.md).
    """
    path = path.resolve()
    manifest = read_manifest(path)
    for stranger, code, problem in strangers(path, manifest):
        raise InputError(f"{stranger}: {problem}", code=code)
    return Artifact(path, manifest)


def threads_of(manifest: Manifest) -> int | None:
    """Return how many threads the artifact takes where its user does not say; None for no such wish."""
    found = manifest.details.get("threads")
    return found if isinstance(found, int) and found >= 1 else None


def _run_of(path: Path) -> str:
    """Return where the artifacts are if `path` is the folder of a run; else nothing."""
    found = sorted(path.glob(f"artifacts/*/{MANIFEST}"))
    if not found:
        return ""
    names = ", ".join(file.parent.name for file in found)
    return f" It is the folder of a run; its artifacts are in {path / 'artifacts'}: {names}."


def _package_of(path: Path) -> str:
    """Return which form of package `path` is, if it is one that others open; else nothing."""
    try:
        with (path / "README.md").open(encoding="utf-8") as stream:
            found = _PACKAGED.search(stream.read(_README_CHARACTERS))
    except (OSError, ValueError):
        return ""
    if found is None or not (path / SUMS).is_file():
        return ""
    return (
        f" It is a package of the form '{found[1]}', which others open (README.md says how). smelt opens"
        " packages of the forms standalone and huggingface, and the artifact that this one was made of."
    )


def _model_of(path: Path) -> str:
    """Return how to come to an artifact if `path` is a model's folder; else nothing."""
    if not (path / "config.json").is_file():
        return ""
    return (
        f" It looks like a model's: `smelt init {path}` writes a recipe whose run makes artifacts of it, also"
        " of the model as it is."
    )


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the artifact in the folder `path`; the other files are not looked at.

    Raises:
        InputError: there is no such folder, no manifest, the manifest cannot be read, or it lists a file
            outside of the folder.
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
            f"{path}: {missing}{_run_of(path)}{_package_of(path) or _model_of(path)}", code="not-an-artifact"
        )
    try:
        if file.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ValueError(f"it has more than {_MAX_MANIFEST_BYTES:,} bytes")
        manifest = Manifest.model_validate(load_json(file))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{file}: not a manifest that this version of smelt reads: {error}", code="damaged-manifest"
        ) from error
    for name in manifest.files:
        if not _is_inside(name):
            raise InputError(
                f"{file}: the file name {name!r} leads out of the artifact.", code="path-outside-folder"
            )
        if not is_known_kind(name):
            raise InputError(
                f"{file}: lists {name[:200]!r}, which is no weight, graph, tokenizer or setting and might be"
                " executed. Remove the file, or do not use this artifact.",
                code="unknown-file",
            )
    return manifest


# The kinds of files that stages write. Anything else (a script, a library, a pickle, a link for a shell)
# might be executed by what opens the artifact, or by what it is packaged for.
_KINDS = frozenset(
    {".json", ".safetensors", ".onnx", ".onnx_data", ".data", ".plan", ".spm", ".model", ".jinja"}
)
_TEXTS = frozenset({"vocab.txt", "merges.txt"})  # of tokenizers; others may be a requirements.txt
# Names that mean the same on every system, to every shell, and are not hidden.
_NAME = re.compile(
    r"(?!(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|$))[^.\-<>:\"|?*\\/\n\t][^<>:\"|?*\\/\n\t]*(?<![ .])",
    re.IGNORECASE,
)


def is_known_kind(name: str) -> bool:
    """Say whether a file of this name, relative to an artifact's folder, is of a kind that stages write."""
    path = PurePosixPath(name)
    if name == MANIFEST or printable(name) != name or not all(map(_NAME.fullmatch, path.parts)):
        return False
    return path.suffix.lower() in _KINDS or path.name in _TEXTS


def _is_inside(name: str) -> bool:
    """Say whether `name` is the relative name of a file below the folder, on any system."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    absolute = PurePosixPath(name).is_absolute() or bool(PureWindowsPath(name).drive)
    return bool(parts) and ".." not in parts and not absolute and "\0" not in name


def strangers(folder: Path, manifest: Manifest) -> Iterator[tuple[Path, str, str]]:
    """Yield what was never part of the artifact and could do harm, each with code and text of what is wrong.

    That is links that lead out of the folder, and files that the manifest does not list.
    """
    listed = {MANIFEST, *manifest.files}
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(where, name)
            inside = path.relative_to(folder)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(folder):
                target = os.readlink(path)
                yield (
                    path,
                    "path-outside-folder",
                    f"a link to {target}, which leads out of the artifact. Copy the file there instead.",
                )
            elif name in files and inside.as_posix() not in listed and not is_harmless(inside):
                yield (
                    path,
                    "unknown-file",
                    f"this file is not of the artifact: {MANIFEST} does not list it, and it could be read as"
                    " part of the model. Remove it or move it elsewhere.",
                )


def is_harmless(inside: Path) -> bool:
    """Say whether nothing reads the file, by its name relative to the folder, as part of a model."""
    if inside.as_posix() in _OF_PACKAGES or any(p.startswith(".") or p == _COMPILED for p in inside.parts):
        return True
    return inside.name.lower() in _OF_SYSTEMS or _NOTES.fullmatch(inside.name) is not None
