"""What several tests only read is made once in a run of the tests, in whichever process asks first."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

FOLDER_VARIABLE = "SMELT_TESTS_MADE"


def make_once(name: str, make: Callable[[Path], Any]) -> Path:
    """Return the folder `name`, which `make` makes and fills if it is not there yet; read only.

    All processes of a run share it, and it goes with the run (`pytest_smelt`).
    """
    found = shared_folder() / re.sub(r"[^\w.-]+", "-", name)
    whole = found.with_name(f"{found.name}.whole")
    with FileLock(f"{found}.lock"):
        if not whole.exists():
            shutil.rmtree(found, ignore_errors=True)  # what a maker left that failed
            make(found)
            whole.touch()
    return found


@functools.cache
def shared_folder() -> Path:
    """Return the folder of this run of the tests; without pytest, one of this process."""
    if (given := os.environ.get(FOLDER_VARIABLE)) is not None:
        return Path(given)
    made = Path(tempfile.mkdtemp(prefix="smelt-tests-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
