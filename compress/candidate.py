"""A model in the middle of a stage's work as an artifact, so that it is scored as a finished one is."""

from __future__ import annotations

from pathlib import Path

from smelt.core.artifact import Artifact, FileRecord, Manifest
from smelt.core.files import hash_of, sha256_of
from smelt.core.stage import Context


def candidate(folder: Path, src: Artifact, ctx: Context) -> Artifact:
    """Return the torch model in `folder`, made of `src`, with a key of what the files hold."""
    files = {
        path.relative_to(folder).as_posix(): FileRecord(
            sha256=sha256_of(path), size_bytes=path.stat().st_size
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = Manifest(
        key=hash_of({name: record.sha256 for name, record in files.items()}),
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
