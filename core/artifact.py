"""The one thing that passes between stages: a complete directory with a manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from smelt.core.errors import InputError
from smelt.core.files import sha256_of

Format = Literal["torch", "onnx", "tensorrt"]
MANIFEST = "manifest.json"


class FileRecord(BaseModel):
    """Size and SHA-256 of one file of an artifact."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    sha256: str
    size_bytes: int


class Manifest(BaseModel):
    """What an artifact says of itself, in `manifest.json`.

    `facts` holds what the stage found out and the report shows: `parameters` (count), `target`,
    `dtype`, `parity` and whatever else the technique wants to tell.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1
    key: str
    format: Format
    task: str
    stage: str
    settings: dict[str, Any]
    seed: int
    parent: str | None
    versions: dict[str, str]
    files: dict[str, FileRecord] = Field(default_factory=dict)
    facts: dict[str, Any] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)
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
    def size_bytes(self) -> int:
        """Bytes on disk of what is deployed: weights, graphs, engines; not the tokenizer's files."""
        ends = (".safetensors", ".onnx", ".data", ".onnx_data", ".engine")
        return sum(r.size_bytes for n, r in self.manifest.files.items() if n.endswith(ends))

    def verify(self) -> None:
        """Compare every file with its recorded size and hash.

        Raises:
            InputError: a file is missing or has other bytes than when it was written.
        """
        for name, record in self.manifest.files.items():
            path = self.path / name
            if not path.is_file():
                raise InputError(f"{path}: this file of the artifact is missing. {_REBUILD}")
            if path.stat().st_size != record.size_bytes or sha256_of(path) != record.sha256:
                raise InputError(f"{path}: its bytes are not those that were written. {_REBUILD}")


_REBUILD = "Run the recipe again with --fresh to build it anew."


def read_artifact(path: Path) -> Artifact:
    """Open the artifact in the folder `path`.

    Raises:
        InputError: there is no such folder, no manifest, or the manifest cannot be read.
    """
    path = path.resolve()
    file = path / MANIFEST
    if not path.is_dir():
        raise InputError(f"{path}: no such folder. An artifact is a folder such as runs/x/artifacts/onnx.")
    if not file.is_file():
        raise InputError(f"{path}: no {MANIFEST} in this folder, so it is not a smelt artifact.")
    try:
        manifest = Manifest.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, ValidationError) as error:
        raise InputError(f"{file}: not a manifest that this version of smelt reads: {error}") from error
    for name in manifest.files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise InputError(f"{file}: the file name {name!r} leads out of the artifact.")
    return Artifact(path, manifest)
