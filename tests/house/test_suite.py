"""The tests' own machinery: order, the quick part, short failures, the harness, matrices, shared folders."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import harness, pytest_smelt, shared_folders
from tests.support.pairs import matrix

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


def test_harness_rejects_unexpected_exit_codes_and_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nowhere.yaml" in harness.smelt("plan", "nowhere.yaml", code=2).output
    with pytest.raises(AssertionError) as excinfo:
        harness.smelt("plan", "nowhere.yaml", code=0)
    assert "nowhere.yaml" in str(excinfo.value)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("smelt.pipeline.plan.load_plan.load_plan", fail)
    with pytest.raises((AssertionError, ZeroDivisionError)):  # caught by smelt, or not
        harness.smelt("plan", "nowhere.yaml")
    assert "ZeroDivisionError" in harness.smelt("plan", "nowhere.yaml", code=1, expect_bug=True).output


def a_long_failure() -> None:
    try:
        list(map(int, ["\n".join(f"line {n}" for n in range(100))]))
    except ValueError as error:
        raise RuntimeError("\n".join(["export failed", *(f"row {n}" for n in range(300))])) from error


def test_long_failure_is_shortened_to_both_ends() -> None:
    with pytest.raises(RuntimeError) as excinfo:
        a_long_failure()
    lines = pytest_smelt.shorten_failure(excinfo, ROOT).splitlines()
    assert len(lines) < 40
    assert lines[0] == "RuntimeError: export failed"
    assert {"E   RuntimeError: export failed", "E   row 299", "E   ... 287 lines ..."} <= set(lines)


def test_files_outside_quick_part_are_not_collected() -> None:
    config = SimpleNamespace(getoption=lambda name: "quick", rootpath=ROOT)
    ignored = [path for path in FILES if pytest_smelt.pytest_ignore_collect(path, config)]
    assert ROOT / "tests" / "pipeline" / "whole" / "test_matrix.py" in ignored
    assert Path(__file__) not in ignored
    full_config = SimpleNamespace(getoption=lambda name: "", rootpath=ROOT)
    assert not any(pytest_smelt.pytest_ignore_collect(path, full_config) for path in FILES)


def test_sampled_matrix_has_each_row_and_column(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = "abcdefg", "xyz"
    monkeypatch.delenv("SMELT_MATRIX", raising=False)
    some = matrix.matrix_cells(rows, columns, full=lambda row: row == "b")
    assert {row for row, _ in some} == set(rows)
    assert {column for _, column in some} == set(columns)
    assert len(some) == len(rows) + 2
    monkeypatch.setenv("SMELT_MATRIX", "all")
    assert len(matrix.matrix_cells(rows, columns)) == 21


def test_make_once_repeats_only_after_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_folders, "shared_folder", lambda: tmp_path)
    folders = []

    def make(folder: Path) -> None:
        folders.append(folder)
        folder.mkdir()
        if len(folders) == 1:
            raise OSError("the disk is full")

    with pytest.raises(OSError, check=lambda error: error.args == ("the disk is full",)):
        shared_folders.make_once("a b", make)
    assert shared_folders.make_once("a b", make) == shared_folders.make_once("a b", make)
    assert len(folders) == 2
