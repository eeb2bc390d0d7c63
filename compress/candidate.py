"""Intermediate models of a stage as artifacts, so that they are scored like finished ones."""

from __future__ import annotations

from pathlib import Path

from smelt.core.artifact import Artifact, FileRecord, Manifest
from smelt.core.files import json_hash, sha256_of
from smelt.core.stage import Context


def candidate_artifact(folder: Path, src: Artifact, ctx: Context) -> Artifact:
    """Return the torch model in `folder`, derived from `src`, as an artifact keyed by its file hashes."""
    files = {
        path.relative_to(folder).as_posix(): FileRecord(
            sha256=sha256_of(path), size_bytes=path.stat().st_size
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = Manifest(
        key=json_hash({name: record.sha256 for name, record in files.items()}),
        format="torch",
        task=ctx.task,
        stage="checkpoint",
        settings={},
        seed=ctx.seed,
        parent=src.key,
        versions=dict(src.manifest.versions),
        files=files,
    )
    return Artifact(folder, manifest)
