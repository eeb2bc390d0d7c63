"""What several tests only read is made once in a run of the tests, in whichever process asks first."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock

FOLDER_VARIABLE = "SMELT_TESTS_MADE"


def make_once(name: str, make: Callable[[Path], Any]) -> Path:
    """Return the folder `name`, which `make` makes and fills if it is not there yet; read only.

    All processes of a run share it, and it goes with the run (`pytest_smelt`).
    """
    path = shared_folder() / re.sub(r"[^\w.-]+", "-", name)
    complete = path.with_name(f"{path.name}.whole")
    with FileLock(f"{path}.lock"):
        if not complete.exists():
            shutil.rmtree(path, ignore_errors=True)  # what a maker left that failed
            make(path)
            complete.touch()
    return path


def written_once(write: Callable[..., Path]) -> Callable[..., Path]:
    """Return a writer of models that writes each model once in a run and copies it afterwards.

    torch's generator ends in the state that writing leaves it in: tests draw from it.
    """

    @functools.wraps(write)
    def copy(folder: Path, *arguments: Any, **options: Any) -> Path:
        import torch

        def make(new: Path) -> None:
            new.mkdir()
            write(new / "model", *arguments, **options)
            (new / "generator").write_bytes(torch.get_rng_state().numpy().tobytes())

        signature = ", ".join(
            [*map(repr, arguments), *(f"{key}={options[key]!r}" for key in sorted(options))]
        )
        written_folder = written_model(f"{write.__module__}.{write.__qualname__}({signature})", make)
        shutil.copytree(written_folder / "model", folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
        torch.set_rng_state(
            torch.frombuffer(bytearray((written_folder / "generator").read_bytes()), dtype=torch.uint8)
        )
        return folder

    models: dict[str, Path] = {}

    def written_model(call: str, make: Callable[[Path], Any]) -> Path:
        if call not in models:
            models[call] = make_once(f"model-{sha256(call.encode()).hexdigest()[:16]}", make)
        return models[call]

    return copy


@functools.cache
def shared_folder() -> Path:
    """Return the folder of this run of the tests; without pytest, one of this process."""
    if (folder_name := os.environ.get(FOLDER_VARIABLE)) is not None:
        return Path(folder_name)
    folder = Path(tempfile.mkdtemp(prefix="smelt-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
