"""Progress of a run: a line with the time left on a terminal, plain lines elsewhere.

All lines are also written to the run's `log.txt`, with time stamps.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from smelt.core.messages import escape_controls

_REDRAW_SECONDS = 0.1
_PLAIN_LINE_SECONDS = 30.0


class Display:
    """Prints lines for finished work, and one progress line that is updated in place."""

    def __init__(self, log: Path | None = None, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._moving = self._stream.isatty()
        self._quiet = quiet
        self._log = log.open("a", encoding="utf-8") if log else None
        self.log_path = log or Path("log.txt")
        self._drawn = False
        self.start_work("")

    def start_work(self, what: str) -> None:
        """Set the label of the following `progress` calls."""
        self._what = what
        self._started = time.monotonic()
        self._last = self._started if not self._moving else 0.0

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total` with the time left, at most ten times a second."""
        now = time.monotonic()
        if self._quiet or now - self._last < (_REDRAW_SECONDS if self._moving else _PLAIN_LINE_SECONDS):
            return
        self._last = now
        left = (now - self._started) / done * (total - done) if done else None
        text = f"  {self._what}: {done}/{total} {note}" + (
            f", {duration(left)} left" if left is not None else ""
        )
        if self._moving:
            self._stream.write(f"\r\x1b[K{escape_controls(text)[:79]}")
            self._stream.flush()
            self._drawn = True
        else:
            self._stream.write(text + "\n")

    def print_line(self, text: str) -> None:
        """Print a permanent line, and write it to the log."""
        self._clear()
        text = escape_controls(text)
        if not self._quiet:
            self._stream.write(text + "\n")
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
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._drawn = False


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
