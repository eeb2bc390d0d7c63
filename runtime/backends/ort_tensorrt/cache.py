"""Where a provider keeps its engines: a folder of the user's cache for each graph, machine and versions.

ONNX Runtime names a cached engine after the graph's nodes, not after its weights, and takes it without a
question ("clean up any old engine ... if any of the following changes", its documentation says). So
everything that an engine depends on is in the folder's name, and stands readable in `made_for.json`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.files import hash_of, load_json, write_atomically

NOTE = "made_for.json"
_DIGITS = 16


def cache_home() -> Path:
    """Return the folder of all such caches; it may be removed whenever nothing runs."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "smelt" / "ort-tensorrt"


def engine_cache(made_for: Mapping[str, Any]) -> Path | None:
    """Return the folder of engines that are made for just this, empty where there were none.

    A folder whose note says something else, or nothing that can be read, is emptied. None: the cache cannot
    be written, so that engines are built each time.

    Args:
        made_for: JSON-able: graph, options, versions, GPU.
    """
    folder = cache_home() / hash_of(made_for)[:_DIGITS]
    note = folder / NOTE
    try:
        if folder.exists() and _read(note) != made_for:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            write_atomically(note, json.dumps(made_for, indent=1, sort_keys=True) + "\n")
        if not os.access(folder, os.W_OK):
            return None
    except OSError:
        return None
    return folder


def _read(note: Path) -> Any:
    try:
        return load_json(note)
    except (OSError, ValueError):
        return None


def empty(folder: Path) -> None:
    """Remove what a provider left in the folder, for example half an engine; the note stays."""
    for path in folder.iterdir():
        if path.name != NOTE:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
