"""The command line of infer.py."""

from __future__ import annotations

import argparse
import io
import sys
from typing import Any


def read_texts(about: str | None) -> list[str]:
    """Return the words of the command line, or else the lines of standard input; refuse what is no text."""
    parser = argparse.ArgumentParser(prog="infer.py", description=about)
    parser.add_argument("text", nargs="*", help="one each; without any, each line of standard input is one")
    words: list[str] = parser.parse_args().text
    given = b"" if words or not sys.stdin else sys.stdin.buffer.read()
    try:
        "".join(words).encode()
        lines = io.StringIO(given.decode("utf-8-sig"), newline=None).readlines()
    except UnicodeEncodeError:
        parser.error("a text of the command line is not UTF-8")
    except UnicodeDecodeError as error:
        line = given.count(b"\n", 0, error.start) + 1
        parser.error(f"line {line} of standard input is not UTF-8")
    return words or [line.removesuffix("\n") for line in lines]


def print_answers(answers: list[str], counter: Any) -> None:
    """Print a line for each answer; say how many texts were too long."""
    for found in answers:
        sys.stdout.buffer.write(f"{found}\n".encode())
    if counter.cut:
        said = "1 text was" if counter.cut == 1 else f"{counter.cut} texts were"
        print(f"warning: {said} longer than the model takes; cut.", file=sys.stderr)
