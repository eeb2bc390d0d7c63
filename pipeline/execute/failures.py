"""What went wrong in a step or a command, said in words: memory, disk, permission, or a bug.

A stage raises `SmeltError` for what it foresees. Everything else that comes out of it, or out of the
libraries below, is told apart here; the traceback goes into a file (the run's log, for a step) and never
on the terminal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from smelt.core.artifact import Artifact
from smelt.core.errors import RunError, SmeltError
from smelt.core.files import size_of

# What torch, CUDA, ONNX Runtime and C++ say where memory runs out; none of them raises MemoryError.
_MEMORY_WORDS = (
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "bad_alloc",
    "bad allocation",
    "failed to allocate memory",
)
# Written files may pass through Rust or C++, which tell of the disk in words only.
_DISK_WORDS = ("no space left on device", "disk quota exceeded", "os error 28)", "os error 122)")
_DISK_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
_LIMIT_WORDS = ("file too large", "os error 27)")


class _ExplainedError(RunError):
    """An error that was told apart already."""


def explain(error: Exception, step: str, folder: Path, log: Path) -> SmeltError:
    """Return the error that tells the user of `error`; a `SmeltError` is its own.

    Args:
        error: what came out of the step.
        step: the step's name.
        folder: the step's workspace, while it is still there, else the store or the run's folder.
        log: the file that gets the traceback.
    """
    if isinstance(error, _ExplainedError):
        return error
    # a library may wrap a full disk or short memory in an error of its own, smelt's runners too
    shortage = _shortage(error, folder)
    if shortage is None and isinstance(error, SmeltError):
        return error
    code, text = shortage or _unforeseen(error, log)
    return _ExplainedError(f"{step}: {text}", code=code)


def of_the_user(
    failure: SmeltError, store: Path, given: Path | None, artifacts: Mapping[str, Artifact]
) -> SmeltError:
    """Return `failure` with places that its reader knows instead of folders of the store.

    Args:
        failure: what is told.
        store: the root of the store.
        given: the folder that the user named as the model, where its copy is being made.
        artifacts: of the run, by step: what lies in the store is told as `artifacts/STEP` of the run.
    """
    text = str(failure)
    if str(store) not in text:
        return failure
    for name, artifact in artifacts.items():
        text = text.replace(str(artifact.path), f"artifacts/{name}")
    if given is not None:
        text = re.sub(rf"{re.escape(str(store))}/tmp/[^/\s]+/out", lambda _: str(given), text)
    changed = type(failure)(
        text, code=failure.code, setting=failure.setting, file=failure.file, line=failure.line
    )
    return changed.with_traceback(failure.__traceback__)


def explain_command(error: Exception, command: str) -> SmeltError:
    """Return what explains an `error` that no step of a run raised; its traceback goes into a file."""
    log = Path(os.devnull)  # where a full disk has no room for the traceback either
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(prefix=f"smelt-{command}-", suffix=".log", text=True)
        log = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(traceback.format_exception(error))
    return explain(error, f"smelt {command}", Path.cwd(), log)


def _shortage(error: Exception, folder: Path) -> tuple[str, str] | None:
    """Return code and text where the disk is full or the memory short, else None."""
    if _runs_through(error, _is_disk):
        return "disk-full", f"the disk is full: {_written(error, folder)}"
    if _runs_through(error, _is_limit):
        return (
            "file-too-large",
            f"the system allows no file as large as this (ulimit -f): {_written(error, folder)}",
        )
    if _runs_through(error, _is_memory):
        return "out-of-memory", (
            f"out of memory: {_first_line(error)} Try a smaller batch_size (max_tokens_per_batch),"
            " or a machine with more memory."
        )
    return None


def _unforeseen(error: Exception, log: Path) -> tuple[str, str]:
    """Return code and text of an error that nobody has explained."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        code = "permission-denied" if isinstance(error, PermissionError) else "system-error"
        return code, f"{where}{error.strerror or error}. The traceback is in {log}."
    return "unforeseen", (
        f"an error that smelt did not foresee, most likely a bug: {type(error).__name__}:"
        f" {_first_line(error)} The traceback is in {log}; please report it with the recipe."
    )


def trace(error: Exception) -> str:
    """Return the traceback of what smelt did not foresee in `error`, or nothing where it foresaw it all."""
    if all(isinstance(e, SmeltError) for e in _chain(error)):
        return ""
    return "".join(traceback.format_exception(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and what it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _runs_through(error: Exception, test: Callable[[BaseException], bool]) -> bool:
    return any(test(e) for e in _chain(error))


def _is_disk(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _DISK_NUMBERS:
        return True
    return any(word in str(error).lower() for word in _DISK_WORDS)


def _is_limit(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return True
    return any(word in str(error).lower() for word in _LIMIT_WORDS)


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    foreign = not isinstance(error, SmeltError | OSError)
    return foreign and any(word in str(error).lower() for word in _MEMORY_WORDS)


def _written(error: Exception, folder: Path) -> str:
    """Say which file could not be written, how much was there, and how much room is left."""
    # a copy names its source first
    places = (e.filename2 or e.filename for e in _chain(error) if isinstance(e, OSError))
    names = (os.fsdecode(place) for place in places if isinstance(place, str | bytes | os.PathLike))
    out = folder / "out"
    had = f"; the step had written {size_of(out):,} bytes" if out.is_dir() else ""
    try:
        free = f"; {shutil.disk_usage(folder).free:,} bytes are free there now"
    except OSError:
        free = ""
    return (
        f"{next(names, None) or _newest(out) or folder} could not be written{had}{free}. Nothing half-written"
        " is kept. Make room, or give other folders with --store and --out."
    )


def _newest(folder: Path) -> Path | None:
    """Return the file below `folder` that was written to last."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_mtime_ns, default=None)


def _first_line(error: Exception) -> str:
    """Return the first line of the message, as a sentence of at most 300 characters."""
    lines = str(error).strip().splitlines()
    text = (lines[0] if lines else type(error).__name__)[:300].rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
