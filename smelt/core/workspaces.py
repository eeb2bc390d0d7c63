"""Folders for work in progress: removed when the work ends, or by the next run if its process was killed.

Each has a marker next to it, ``NAME.owner``, by which other processes judge whether its process is active.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from smelt.core.files import seconds_since_written
from smelt.core.locks import STALE_AFTER_S, heartbeat, is_active

OWNER_SUFFIX = ".owner"


@contextlib.contextmanager
def workspace(parent: Path) -> Iterator[Path]:
    """Yield an empty folder inside `parent` that is always removed on leaving."""
    path = parent / f"{os.getpid()}-{secrets.token_hex(8)}"
    with heartbeat(path.with_name(path.name + OWNER_SUFFIX)):
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def temporary_workspace() -> Iterator[Path]:
    """Yield an empty folder of this user in the system's folder of temporary files."""
    parent = _temporary_parent()
    with contextlib.suppress(OSError):  # not a folder
        parent.mkdir(mode=0o700, exist_ok=True)
    if _is_own_folder(parent):
        with workspace(parent) as path:
            yield path
        return
    with tempfile.TemporaryDirectory(prefix="smelt-") as folder:  # somebody else has taken the name
        yield Path(folder)


def _temporary_parent() -> Path:
    return Path(tempfile.gettempdir()) / f"smelt-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


def _is_own_folder(path: Path) -> bool:
    """Return whether `path` is a folder of this user, not a link: others can write to the parent folder."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and (not hasattr(os, "getuid") or status.st_uid == os.getuid())


def remove_leftover_workspaces(*parents: Path) -> None:
    """Remove the workspaces of dead processes in `parents` and among the temporary files of this user."""
    for parent in (*parents, *filter(_is_own_folder, (_temporary_parent(),))):
        for marker in parent.glob(f"*{OWNER_SUFFIX}"):
            if not is_active(marker):
                shutil.rmtree(marker.with_suffix(""), ignore_errors=True)
                marker.unlink(missing_ok=True)
        for path in parent.glob("*"):
            has_marker = path.with_name(path.name + OWNER_SUFFIX).exists()
            if path.is_dir() and not has_marker and not may_be_in_use(path):
                shutil.rmtree(path, ignore_errors=True)


def may_be_in_use(path: Path) -> bool:
    """Return whether a process without a marker may still be working on `path`."""
    return seconds_since_written(path) < STALE_AFTER_S
