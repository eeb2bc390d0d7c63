"""What a run prints: its progress, and explanations of unexpected errors.

Progress is a bar with the time left on a terminal, plain lines in pipes and in CI. All lines are also written
to the run's `log.txt`, with time stamps.

Stages raise `SmeltError` for expected errors. All other exceptions, also those of libraries, are classified
here; the traceback is written to a file (the run's log, for a step), never to the terminal.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from smelt.core.artifact import Artifact
from smelt.core.errors import RunError, SmeltError
from smelt.core.files import folder_size
from smelt.core.messages import duration_text, escape_controls

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


# drawing takes about 1 ms of the processor on which latency is measured
_REDRAW_SECONDS = 0.25
_PLAIN_LINE_SECONDS = 30.0


class Display:
    """Prints lines for finished work, and a progress bar below them on a terminal."""

    def __init__(
        self,
        log: Path | None = None,
        stream: TextIO | None = None,
        quiet: bool = False,
        label: str = "",
    ) -> None:
        """Open the log.

        Args:
            log: the run's log.txt.
            stream: where lines are printed (default: standard error). What cannot be printed is dropped: a
                run goes on without its terminal.
            quiet: write to the log only.
            label: of a run that is part of a search: it precedes what is printed, which is progress and the
                lines that `print_line` has as `brief`.
        """
        self._stream = stream or sys.stderr or io.StringIO()  # a process without standard error has None
        is_plain = os.environ.get("CI") or os.environ.get("TERM") == "dumb"
        self._moving = not is_plain and not self._stream.closed and self._stream.isatty()
        self._quiet, self._label = quiet, f"{label}: " if label else ""
        self._log = log.open("a", encoding="utf-8") if log else None
        self.log_path = log or Path("log.txt")
        self._bar: tuple[Progress, TaskID] | None = None
        self.start_work("")

    def start_work(self, what: str) -> None:
        """Set the label of the following `progress` calls."""
        self._clear()
        self._what = f"{self._label}{what}"
        self._time_left = _TimeLeft()
        self._last = time.monotonic() if not self._moving else 0.0

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total` with the time left, at most four times a second."""
        now, seconds = time.monotonic(), self._time_left.update(done, total)
        if self._quiet or now - self._last < (_REDRAW_SECONDS if self._moving else _PLAIN_LINE_SECONDS):
            return
        self._last = now
        if self._moving:
            with suppress(OSError):
                bar, task = self._bar = self._bar or _start_bar(
                    self._stream, escape_controls(self._what), total
                )
                bar.update(task, completed=done, total=total, note=escape_controls(note), refresh=True)
            return
        remaining_text = "" if seconds is None else f", {duration_text(seconds)} left"
        self._print(f"  {self._what}: {done}/{total} {note}{remaining_text}")

    def print_line(self, text: str, brief: bool = False) -> None:
        """Print a permanent line, and write it to the log. brief: print it with a label as well."""
        self._clear()
        text = escape_controls(text)
        if not self._quiet and (brief or not self._label):
            self._print(f"{self._label}{text}")
        self._write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def log_line(self, text: str) -> None:
        """Write `text` to the log only."""
        self._write(f"    {escape_controls(text)}\n")

    def _print(self, text: str) -> None:
        """Print a line, if the terminal can be written."""
        with suppress(OSError, ValueError):  # ValueError: a program has closed its standard error
            self._stream.write(f"{escape_controls(text)}\n")
            self._stream.flush()

    def _write(self, text: str) -> None:
        """Write to the log; if that fails, stop logging and continue."""
        if self._log is None:
            return
        try:
            self._log.write(text)
            self._log.flush()
        except OSError as error:
            log, self._log = self._log, None
            self._print(f"warning: {self.log_path}: logging stopped: {error.strerror}.")
            with suppress(OSError):  # closing flushes the buffer again
                log.close()

    def close(self) -> None:
        """Remove the progress line and close the log."""
        self._clear()
        if self._log:
            with suppress(OSError):
                self._log.close()
            self._log = None

    def _clear(self) -> None:
        if self._bar:
            with suppress(OSError):
                self._bar[0].stop()
            self._bar = None


class _TimeLeft:
    """Estimates the time left of a work by the rate since its first finished unit.

    What comes before that is no measure of the rest: waiting for a lock, loading, compiling.
    """

    def __init__(self) -> None:
        self._first: tuple[float, int, int] | None = None
        self._done = 0

    def update(self, done: int, total: int) -> float | None:
        """Return the seconds left when `done` of `total` units are finished; None if unknown."""
        now = time.monotonic()
        first_point, self._done, last_done = self._first, done, self._done
        if (
            first_point is None or first_point[1] == 0 or total != first_point[2] or done < last_done
        ):  # or another work began
            self._first = (now, done, total)
            return None
        start_time, initial_done, _ = first_point
        return None if done == initial_done else (now - start_time) / (done - initial_done) * (total - done)


def _start_bar(stream: TextIO, what: str, total: int) -> tuple[Progress, TaskID]:
    """Return a bar that is drawn on request only: a thread would disturb measurements and forks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    bar = Progress(
        TextColumn("  {task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
        console=Console(file=stream),
        auto_refresh=False,
        transient=True,
        expand=True,
        redirect_stdout=False,
    )
    bar.start()
    return bar, bar.add_task(what, total=total, note="")


def print_progress(text: str) -> None:
    """Print a line to standard output, if it can be written: work goes on without its terminal."""
    with suppress(OSError, ValueError):
        print(text, flush=True)


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
    explanation = _resource_shortage(error, folder)
    if explanation is None and isinstance(error, SmeltError):
        return error
    code, text = explanation or _unexpected_error(error, log)
    return _ExplainedError(f"{step}: {text}", code=code)


def with_user_paths(
    failure: SmeltError, store: Path, model_folder: Path | None, artifacts: Mapping[str, Artifact]
) -> SmeltError:
    """Return `failure` with paths in the store replaced by paths that the user knows.

    Args:
        failure: the error.
        store: the root of the store.
        model_folder: the user's model folder, replaces the copy that is being made.
        artifacts: artifacts of the run by step; their paths become `artifacts/STEP`.
    """
    text = str(failure)
    if str(store) not in text:
        return failure
    for name, artifact in artifacts.items():
        text = text.replace(str(artifact.path), f"artifacts/{name}")
    if model_folder is not None:
        text = re.sub(rf"{re.escape(str(store))}/tmp/[^/\s]+/out", lambda _: str(model_folder), text)
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
        prefix = f"{error.filename}: " if error.filename else ""
        code = "permission-denied" if isinstance(error, PermissionError) else "system-error"
        return code, f"{prefix}{error.strerror or error}. The traceback is in {log}."
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
    seen_ids: set[int] = set()
    while error is not None and id(error) not in seen_ids:
        seen_ids.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _any_in_chain(error: Exception, test: Callable[[BaseException], bool]) -> bool:
    return any(test(e) for e in _exception_chain(error))


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
        return True
    return any(phrase in str(error).lower() for phrase in _DISK_PHRASES)


def _is_file_size_limit(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return True
    return any(phrase in str(error).lower() for phrase in _FILE_SIZE_PHRASES)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    is_library_error = not isinstance(error, SmeltError | OSError)
    return is_library_error and any(phrase in str(error).lower() for phrase in _MEMORY_PHRASES)


def _write_failure_text(error: Exception, folder: Path) -> str:
    """Return which file could not be written, how much was written, and how much space is free."""
    # for copies, filename2 is the destination
    paths = (e.filename2 or e.filename for e in _exception_chain(error) if isinstance(e, OSError))
    names = (os.fsdecode(path) for path in paths if isinstance(path, str | bytes | os.PathLike))
    out = folder / "out"
    usage = f"; the step wrote {folder_size(out):,} bytes" if out.is_dir() else ""
    try:
        free = f"; {shutil.disk_usage(folder).free:,} bytes are free"
    except OSError:
        free = ""
    return (
        f"cannot write {next(names, None) or _newest_file(out) or folder}{usage}{free}. Incomplete files are"
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
