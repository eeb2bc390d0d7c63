"""Children of smelt import nothing from the current folder, nor do their own children."""

import subprocess

import pytest

from smelt.core.system import child_environment, python_command

IN_CHILD = "import json; print(json.__file__)"
IN_GRANDCHILD = (
    f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {IN_CHILD!r}],"
    " capture_output=True, text=True).stdout)"
)
WITH_SPAWN = "import multiprocessing as m; print(m.get_context('spawn').Pool(1).apply(str, (7,)))"


@pytest.mark.parametrize("code", [IN_CHILD, IN_GRANDCHILD, WITH_SPAWN])
def test_child_process_imports_nothing_from_current_folder(code, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    for name in ("json", "pickle"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')")
    done = subprocess.run(
        python_command("-c", code), env=child_environment(MORE="1"), cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) not in done.stdout
    assert done.stdout.strip()
