"""The command line of infer.py."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable
from typing import Any


def answer_all(answer: Callable[[list[str]], list[str]], counter: Any) -> None:
    """Print an answer to each word of the command line, or else to each line of standard input."""
    stream: Iterable[str] = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig") if sys.stdin else ()
    for found in answer(sys.argv[1:] or [line.removesuffix("\n") for line in stream]):
        sys.stdout.buffer.write(f"{found}\n".encode())
    if counter.cut:
        print(f"warning: {counter.cut} texts were longer than the model takes; cut.", file=sys.stderr)
