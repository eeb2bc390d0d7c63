"""A checkout that is called smelt does not stand before the package in the folder above it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAID = "import smelt; from smelt import run; import smelt.core; print(smelt.__file__, smelt.core.__file__)"


@pytest.fixture
def above(tmp_path: Path) -> Path:
    """A folder with a checkout that is called smelt."""
    (tmp_path / "smelt").symlink_to(ROOT)
    return tmp_path


def python(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder`, where -c and -m look first."""
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_editable_install_is_imported(above: Path) -> None:
    done = python(above, "-c", SAID)
    assert done.stdout.split() == [str(ROOT / "smelt/__init__.py"), str(ROOT / "smelt/core/__init__.py")]
    done = python(above, "-m", "smelt", "--version")
    assert (done.returncode, done.stdout[:5]) == (0, "smelt"), done.stderr


@pytest.mark.parametrize("code", ["import smelt", "from smelt import run", "import smelt.core"])
def test_import_without_install_explains_error(above: Path, code: str) -> None:
    done = python(above, "-S", "-c", code)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert str(ROOT) in last
    assert f"pip install -e {ROOT}" in last
