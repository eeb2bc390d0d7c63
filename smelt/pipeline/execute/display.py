"""Progress of a run: a bar with the time left on a terminal, plain lines in pipes and in CI.

All lines are also written to the run's `log.txt`, with time stamps.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from smelt.core.messages import escape_controls

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
            stream: where lines are printed (default: standard error).
            quiet: write to the log only.
            label: of a run that is part of a search: it precedes what is printed, which is progress and the
                lines that `print_line` has as `brief`.
        """
        self._stream = stream or sys.stderr
        plain = os.environ.get("CI") or os.environ.get("TERM") == "dumb"
        self._moving = self._stream.isatty() and not plain
        self._quiet, self._label = quiet, f"{label}: " if label else ""
        self._log = log.open("a", encoding="utf-8") if log else None
        self.log_path = log or Path("log.txt")
        self._bar: tuple[Progress, TaskID] | None = None
        self.start_work("")

    def start_work(self, what: str) -> None:
        """Set the label of the following `progress` calls."""
        self._clear()
        self._what = f"{self._label}{what}"
        self._started = time.monotonic()
        self._last = self._started if not self._moving else 0.0

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total` with the time left, at most four times a second."""
        now = time.monotonic()
        if self._quiet or now - self._last < (_REDRAW_SECONDS if self._moving else _PLAIN_LINE_SECONDS):
            return
        self._last = now
        if self._moving:
            bar, task = self._bar = self._bar or _start_bar(self._stream, escape_controls(self._what), total)
            bar.update(task, completed=done, total=total, note=escape_controls(note), refresh=True)
            return
        left = f", {duration((now - self._started) / done * (total - done))} left" if done else ""
        self._stream.write(escape_controls(f"  {self._what}: {done}/{total} {note}{left}") + "\n")
        self._stream.flush()

    def print_line(self, text: str, brief: bool = False) -> None:
        """Print a permanent line, and write it to the log. brief: print it with a label as well."""
        self._clear()
        text = escape_controls(text)
        if not self._quiet and (brief or not self._label):
            self._stream.write(f"{escape_controls(self._label)}{text}\n")
            self._stream.flush()
        self._write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def log_line(self, text: str) -> None:
        """Write `text` to the log only."""
        self._write(f"    {escape_controls(text)}\n")

    def _write(self, text: str) -> None:
        """Write to the log; if that fails, stop logging and continue."""
        if self._log is None:
            return
        try:
            self._log.write(text)
            self._log.flush()
        except OSError as error:
            log, self._log = self._log, None
            self._stream.write(f"warning: {self.log_path}: logging stopped: {error.strerror}.\n")
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
            self._bar[0].stop()
            self._bar = None


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


def duration(seconds: float) -> str:
    """Return a duration as text: 0.3 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
