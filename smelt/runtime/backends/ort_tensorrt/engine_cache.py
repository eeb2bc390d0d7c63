"""Cache of a provider's engines: one folder of the user's cache per graph, machine and versions.

ONNX Runtime names a cached engine after the graph's nodes, not after its weights, and uses it without a
check ("clean up any old engine ... if any of the following changes", its documentation says). So
everything that an engine depends on is in the folder's name, and readable in `made_for.json`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.core.files import json_hash, load_json, write_atomically

ENGINE_KEY_FILE = "made_for.json"
_DIGITS = 16


def engine_cache_root() -> Path:
    """Return the folder of all these caches; it may be removed while no model is running."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "smelt" / "ort-tensorrt"


def engine_cache_folder(key: Mapping[str, Any]) -> Path | None:
    """Return the folder of engines for exactly this key, empty if there were none.

    A folder whose `made_for.json` differs, or cannot be read, is emptied. None: the cache cannot be written,
    so that engines are built each time.

    Args:
        key: JSON-able: graph, options, versions, GPU.
    """
    folder = engine_cache_root() / json_hash(key)[:_DIGITS]
    note = folder / ENGINE_KEY_FILE
    try:
        if folder.exists() and _read_key(note) != key:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            write_atomically(note, json.dumps(key, indent=1, sort_keys=True) + "\n")
        if not os.access(folder, os.W_OK):
            return None
    except OSError:
        return None
    return folder


def _read_key(note: Path) -> Any:
    try:
        return load_json(note)
    except (OSError, ValueError):
        return None


def clear_engine_cache(folder: Path) -> None:
    """Remove the provider's files from the folder, for example half an engine; `made_for.json` is kept."""
    for path in folder.iterdir():
        if path.name != ENGINE_KEY_FILE:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
