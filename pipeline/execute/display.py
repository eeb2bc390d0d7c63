"""What a person sees while a run works: a line with time left on a terminal, plain lines elsewhere.

Everything also goes, with times, into the run's `log.txt`.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from smelt.core.text import printable

_REDRAW_EVERY_S = 0.1
_PLAIN_EVERY_S = 30.0


class Display:
    """Lines for finished things, and one moving line for the work under way."""

    def __init__(self, log: Path | None = None, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._moving = self._stream.isatty()
        self._quiet = quiet
        self._log = log.open("a", encoding="utf-8") if log else None
        self.log_path = log or Path("log.txt")
        self._drawn = False
        self.begin("")

    def begin(self, what: str) -> None:
        """Name the work that the next `progress` calls are about."""
        self._what = what
        self._started = time.monotonic()
        self._last = self._started if not self._moving else 0.0

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total` with the time left, at most ten times a second."""
        now = time.monotonic()
        if self._quiet or now - self._last < (_REDRAW_EVERY_S if self._moving else _PLAIN_EVERY_S):
            return
        self._last = now
        left = (now - self._started) / done * (total - done) if done else None
        text = f"  {self._what}: {done}/{total} {note}" + (
            f", {duration(left)} left" if left is not None else ""
        )
        if self._moving:
            self._stream.write(f"\r\x1b[K{printable(text)[:79]}")
            self._stream.flush()
            self._drawn = True
        else:
            self._stream.write(text + "\n")

    def line(self, text: str) -> None:
        """Print a line that stays, and write it to the log."""
        self._clear()
        text = printable(text)
        if not self._quiet:
            self._stream.write(text + "\n")
            self._stream.flush()
        self._write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def record(self, text: str) -> None:
        """Write `text` to the log only."""
        self._write(f"    {printable(text)}\n")

    def _write(self, text: str) -> None:
        """Write to the log; a full disk ends the log, not the run."""
        if self._log is None:
            return
        try:
            self._log.write(text)
            self._log.flush()
        except OSError as error:
            log, self._log = self._log, None
            self._stream.write(f"warning: {self.log_path}: no log from here on: {error.strerror}.\n")
            with suppress(OSError):  # closing tries to write what is left once more
                log.close()

    def close(self) -> None:
        """Remove the moving line and close the log."""
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
    """Return a span of time as a person writes it: 0.3 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
