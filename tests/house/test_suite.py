"""The tests' own machinery: order, the quick part, short failures, the harness, matrices, shared folders."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import pytest_smelt

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
FILES = [path for path in sorted(TESTS.rglob("test_*.py")) if "support" not in path.parts]


def test_slowest_test_files_exist_and_run_first(pytestconfig: pytest.Config) -> None:
    assert [file for file in pytest_smelt.SLOWEST_FILES if not (TESTS / file).is_file()] == []
    first, second = (f"tests/{file}" for file in pytest_smelt.SLOWEST_FILES[:2])
    names = ["tests/a.py::a", f"{second}::b", f"{first}::a", "tests/b.py::a", "tests/b.py::b", f"{second}::a"]
    items = [SimpleNamespace(nodeid=name) for name in names]
    pytest_smelt.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [names[i] for i in (2, 1, 5, 3, 4, 0)]
    assert not getattr(pytestconfig.option, "loadscopereorder", False)


def test_files_outside_quick_part_are_not_collected() -> None:
    config = SimpleNamespace(getoption=lambda name: "quick", rootpath=ROOT)
    ignored = [path for path in FILES if pytest_smelt.pytest_ignore_collect(path, config)]
    assert ROOT / "tests" / "pipeline" / "whole" / "test_matrix.py" in ignored
    assert Path(__file__) not in ignored
    full_config = SimpleNamespace(getoption=lambda name: "", rootpath=ROOT)
    assert not any(pytest_smelt.pytest_ignore_collect(path, full_config) for path in FILES)
