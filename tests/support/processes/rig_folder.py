"""A folder of test libraries that is made once, below build/rig, by whichever process needs it first."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

_SECONDS_FOR_PIP = 900


class NoRigError(Exception):
    """Why there is no rig here."""


def rig_base(variable: str) -> Path:
    """Return the folder of rigs: that of the environment variable, or build/rig.

    Raises:
        NoRigError: the variable is `off`.
    """
    rig_path = os.environ.get(variable)
    if rig_path == "off":
        raise NoRigError(f"{variable} is off")
    return Path(rig_path or Path(__file__).resolve().parents[3] / "build" / "rig").resolve()


def make_rig(base: Path, name: str, make: Callable[[Path, str], None]) -> Path:
    """Return the finished folder `base`/`name`; `make(folder, compiler)` fills it if it is not there.

    Raises:
        NoRigError: it cannot be made.
    """
    rig = _make_once(base, name, make)
    if isinstance(rig, NoRigError):
        raise rig
    return rig


@functools.cache
def _make_once(base: Path, name: str, make: Callable[[Path, str], None]) -> Path | NoRigError:
    """Return the folder; the answer, also a bad one, holds for the whole test run."""
    rig = base / name
    if rig.is_dir():
        return rig
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform != "linux":
        return NoRigError("the libraries are linked by their Linux names")
    if compiler is None:
        return NoRigError("there is no C compiler (cc) for the stub of a library")
    import fcntl

    try:
        base.mkdir(parents=True, exist_ok=True)
        with (base / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the system when its holder dies
            if not rig.is_dir():
                with tempfile.TemporaryDirectory(dir=base) as space:
                    half = Path(space) / "rig"
                    half.mkdir()
                    make(half, compiler)
                    half.rename(rig)
    except NoRigError as error:
        return error
    except (OSError, subprocess.SubprocessError) as error:
        return NoRigError(f"the rig could not be made in {base}: {error}")
    return rig


def install(site: Path, packages: tuple[str, ...]) -> None:
    """Fetch `packages`, without what they depend on, into `site`.

    Raises:
        NoRigError: pip is not there or fails, for example without a network.
    """
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input",
        "--no-deps", "--no-compile", "--only-binary", ":all:", "--retries", "1", "--timeout", "30",
        "--target", str(site), *packages,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_FOR_PIP, check=False)
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise NoRigError(f"pip cannot fetch {' and '.join(packages)}: {last}")
