"""Threads of torch spin only shortly for one that does not run: on a busy machine it would take most time."""

import subprocess

import pytest

from smelt.core.system import child_environment, python_command

CODE = "import sys, smelt, os; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(("variables", "expected"), [
    ({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None"),
])  # fmt: skip
def test_spinning_is_limited_before_torch_is_imported_unless_user_sets_it(variables, expected, monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    done = subprocess.run(
        python_command("-c", CODE), env=child_environment(**variables), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["False", expected]
