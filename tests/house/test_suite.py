"""The tests' own machinery: order, the quick part, short failures, the harness, matrices, shared folders."""

import ast
import re
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


def test_no_function_draws_from_a_generator_of_its_module() -> None:
    """What a test draws would depend on the tests before it."""
    assert [f"{path.relative_to(TESTS)}: {name}" for path in FILES for name in _shared_generators(path)] == []


def _shared_generators(path: Path) -> set[str]:
    """Return the random generators that a module creates and a function of it reads."""
    module = ast.parse(path.read_text())
    generators = {
        ast.unparse(statement.targets[0])
        for statement in module.body
        if isinstance(statement, ast.Assign)
        and re.fullmatch(
            r"np\.random\.default_rng\(\d*\)|torch\.Generator\(.*\)", ast.unparse(statement.value)
        )
    }
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)] if generators else []
    names = [[node for node in ast.walk(f) if isinstance(node, ast.Name)] for f in functions]
    read = [{n.id for n in nodes} - {n.id for n in nodes if isinstance(n.ctx, ast.Store)} for nodes in names]
    return generators & set().union(*read)
