"""Services of the pages, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(*arguments: str, folder: Path | None = None) -> Iterator[str]:
    """Run Python with `arguments` in `folder`; yield the address of the service, which prints its port."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            assert words[:1] == ["port"], words
            yield f"http://127.0.0.1:{words[1]}"
        finally:
            process.terminate()
