"""The command line of infer.py."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from typing import Any


def answer_all(make: Callable[[], Any], answer: Callable[[Any, list[str]], list[str]], about: Any) -> None:
    """Print an answer to each word of the command line, or else to each line of standard input."""
    parser = argparse.ArgumentParser(prog="infer.py", description=about)
    parser.add_argument("text", nargs="*", help="without any, each line of standard input is one")
    stream = sys.stdin and io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig", "surrogateescape")
    texts = parser.parse_args().text or [line.removesuffix("\n") for line in stream or ()]
    if wrong := next((text for text in texts if text != text.encode(errors="replace").decode()), None):
        parser.error(f"this text is not UTF-8: {wrong!r}")
    model = make()
    try:
        answers = answer(model, texts)
    except (FloatingPointError, ValueError) as error:  # a ValueError: a file that is no image
        parser.exit(1 + isinstance(error, ValueError), f"error: {error}\n")
    sys.stdout.buffer.write("".join(f"{found}\n" for found in answers).encode())
    if cut := model.cut if hasattr(model, "cut") else model.tokenizer.cut:
        print(f"warning: texts longer than the model takes, which were cut: {cut}", file=sys.stderr)
