"""Start Python in a child process that imports nothing from the current folder.

`python -m MODULE` and `python -c CODE` put the current folder first on `sys.path`. That folder is often a
download: a `json.py` or `torch.py` in it would run.
"""

from __future__ import annotations

import os
import sys

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"  # also for processes that a child starts (multiprocessing, compilers)


def python_command(*arguments: str) -> list[str]:
    """Return the command that runs this Python with `arguments` (`-m ...`, `-c ...`) on a safe path."""
    return [sys.executable, "-P", *arguments]


def child_environment(**more: str) -> dict[str, str]:
    """Return this process's environment variables with `more`, for a child process on a safe path."""
    return {**os.environ, SAFE_PATH_VARIABLE: "1", **more}
