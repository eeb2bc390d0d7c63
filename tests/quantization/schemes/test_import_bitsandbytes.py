import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from torch import nn

from smelt.compress.quantize.plan_layers import quantize_module
from smelt.core import system
from smelt.core.errors import MissingDependencyError
from smelt.quantization.schemes.bitsandbytes import BITSANDBYTES_PACKAGES, import_bitsandbytes
from tests.support.expected_errors import raises_code

SCHEMES = pytest.mark.parametrize("scheme", ["bnb-nf4", "bnb-int8"])
ROOT = Path(__file__).resolve().parents[3]


def test_minimum_version_equals_that_of_the_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["bitsandbytes"] == [f"{name}>={oldest}" for name, oldest in BITSANDBYTES_PACKAGES.items()]


@SCHEMES
def test_layer_without_the_package_is_refused_before_computing(monkeypatch, scheme):
    monkeypatch.setattr(system, "installed_version", lambda name: "0.40.1")
    with raises_code("not-installed", MissingDependencyError) as caught:
        quantize_module(nn.Linear(64, 8), scheme)
    assert all(part in str(caught.value) for part in (scheme, "0.48", "0.40.1"))


def test_package_that_fails_to_load_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with raises_code("broken-installation", MissingDependencyError):
        import_bitsandbytes.__wrapped__()


FETCHES_NOTHING = """
import sys
from smelt.quantization.schemes.bitsandbytes import import_bitsandbytes
assert "bitsandbytes" not in sys.modules
import_bitsandbytes()
assert "kernels" not in sys.modules and "bitsandbytes" in sys.modules
"""


def test_import_downloads_and_prints_nothing():
    """In a process of its own, which has not imported it: a package `kernels` would fetch compiled code."""
    pytest.importorskip("bitsandbytes", reason="the extra bitsandbytes is not installed")
    code = f"import logging\nlogging.basicConfig()\n{FETCHES_NOTHING}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
