"""The command line of infer.py."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from typing import Any


def run_command_line(
    make: Callable[[], Any], answer: Callable[[Any, list[str]], list[str]], about: Any
) -> None:
    """Print an answer for each argument, or else for each line of standard input."""
    parser = argparse.ArgumentParser(prog="infer.py", description=about)
    parser.add_argument("text", nargs="*", help="if omitted, each line of standard input is a text")
    stream = sys.stdin and io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig", "surrogateescape")
    texts = parser.parse_args().text or [line.removesuffix("\n") for line in stream or ()]
    if wrong := next((text for text in texts if text != text.encode(errors="replace").decode()), None):
        parser.error(f"a text is not valid UTF-8: {wrong!r}")
    model = make()
    try:
        answers = answer(model, texts)
    except (FloatingPointError, ValueError) as error:  # a ValueError: a file that is not an image
        parser.exit(1 + isinstance(error, ValueError), f"error: {error}\n")
    sys.stdout.buffer.write("".join(f"{found}\n" for found in answers).encode())
    if cut := model.cut if hasattr(model, "cut") else model.tokenizer.cut:
        print(f"warning: texts longer than the model takes, which were cut: {cut}", file=sys.stderr)
