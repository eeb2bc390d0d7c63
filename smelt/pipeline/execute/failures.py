"""Explain unexpected errors of steps and commands: memory, disk, permission, or a bug.

Stages raise `SmeltError` for expected errors. All other exceptions, also those of libraries, are classified
here; the traceback is written to a file (the run's log, for a step), never to the terminal.
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
from smelt.core.files import folder_size

# Messages of torch, CUDA, ONNX Runtime and C++ when out of memory; they do not raise MemoryError.
_MEMORY_PHRASES = (
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "bad_alloc",
    "bad allocation",
    "failed to allocate memory",
)
# Libraries in Rust or C++ report a full disk only in the message.
_DISK_PHRASES = ("no space left on device", "disk quota exceeded", "os error 28)", "os error 122)")
_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_FILE_SIZE_PHRASES = ("file too large", "os error 27)")


class _ExplainedError(RunError):
    """An error that was explained already."""


def explain_step_error(error: Exception, step: str, folder: Path, log: Path) -> SmeltError:
    """Return an error with a message for the user; a `SmeltError` is returned unchanged.

    Args:
        error: the exception of the step.
        step: the step's name.
        folder: the step's workspace if it still exists, else the store or the run's folder.
        log: the file with the traceback.
    """
    if isinstance(error, _ExplainedError):
        return error
    # libraries and smelt's runners may wrap errors about disk or memory
    shortage = _resource_shortage(error, folder)
    if shortage is None and isinstance(error, SmeltError):
        return error
    code, text = shortage or _unexpected_error(error, log)
    return _ExplainedError(f"{step}: {text}", code=code)


def with_user_paths(
    failure: SmeltError, store: Path, given: Path | None, artifacts: Mapping[str, Artifact]
) -> SmeltError:
    """Return `failure` with paths in the store replaced by paths that the user knows.

    Args:
        failure: the error.
        store: the root of the store.
        given: the user's model folder, replaces the copy that is being made.
        artifacts: artifacts of the run by step; their paths become `artifacts/STEP`.
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
    """Return the explanation of an `error` of a command; its traceback is written to a temporary file."""
    log = Path(os.devnull)  # if the disk is too full for the traceback
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(prefix=f"smelt-{command}-", suffix=".log", text=True)
        log = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(traceback.format_exception(error))
    return explain_step_error(error, f"smelt {command}", Path.cwd(), log)


def _resource_shortage(error: Exception, folder: Path) -> tuple[str, str] | None:
    """Return code and message if disk or memory is exhausted, else None."""
    if _any_in_chain(error, _is_disk_full):
        return "disk-full", f"the disk is full: {_write_failure_text(error, folder)}"
    if _any_in_chain(error, _is_file_size_limit):
        return (
            "file-too-large",
            f"file larger than the system's limit (ulimit -f): {_write_failure_text(error, folder)}",
        )
    if _any_in_chain(error, _is_out_of_memory):
        return "out-of-memory", (
            f"out of memory: {_first_line(error)} Use a smaller batch_size or max_tokens_per_batch,"
            " or a machine with more memory."
        )
    return None


def _unexpected_error(error: Exception, log: Path) -> tuple[str, str]:
    """Return code and message of any other unexpected error."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        code = "permission-denied" if isinstance(error, PermissionError) else "system-error"
        return code, f"{where}{error.strerror or error}. The traceback is in {log}."
    return "unforeseen", (
        f"unexpected error, probably a bug in smelt: {type(error).__name__}: {_first_line(error)}"
        f" The traceback is in {log}. Please report it with the recipe."
    )


def unexpected_traceback(error: Exception) -> str:
    """Return the traceback if the chain of `error` has an unexpected exception; else an empty string."""
    if all(isinstance(e, SmeltError) for e in _exception_chain(error)):
        return ""
    return "".join(traceback.format_exception(error))


def _exception_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _any_in_chain(error: Exception, test: Callable[[BaseException], bool]) -> bool:
    return any(test(e) for e in _exception_chain(error))


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
        return True
    return any(word in str(error).lower() for word in _DISK_PHRASES)


def _is_file_size_limit(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return True
    return any(word in str(error).lower() for word in _FILE_SIZE_PHRASES)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    foreign = not isinstance(error, SmeltError | OSError)
    return foreign and any(word in str(error).lower() for word in _MEMORY_PHRASES)


def _write_failure_text(error: Exception, folder: Path) -> str:
    """Return which file could not be written, how much was written, and how much space is free."""
    # for copies, filename2 is the destination
    places = (e.filename2 or e.filename for e in _exception_chain(error) if isinstance(e, OSError))
    names = (os.fsdecode(place) for place in places if isinstance(place, str | bytes | os.PathLike))
    out = folder / "out"
    had = f"; the step wrote {folder_size(out):,} bytes" if out.is_dir() else ""
    try:
        free = f"; {shutil.disk_usage(folder).free:,} bytes are free"
    except OSError:
        free = ""
    return (
        f"cannot write {next(names, None) or _newest_file(out) or folder}{had}{free}. Incomplete files are"
        " removed. Free some space, or choose other folders with --store and --out."
    )


def _newest_file(folder: Path) -> Path | None:
    """Return the most recently written file in `folder`."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_mtime_ns, default=None)


def _first_line(error: Exception) -> str:
    """Return the first line of the message, at most 300 characters, ending with a full stop."""
    lines = str(error).strip().splitlines()
    text = (lines[0] if lines else type(error).__name__)[:300].rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
