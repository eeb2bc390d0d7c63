"""Only a task's own file knows its name; all other code asks for traits, or for the task's specification."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smelt.data.tasks import ALL_TASKS, TASK_TRAITS
from smelt.tasks.registry import all_specs
from smelt.tasks.spec import TaskSpec

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("smelt", "compress", "export", "evaluate")
TASK_FILES = ("smelt/data/tasks.py", "smelt/tasks/", "smelt/models/families/")
# Files and folders that still name tasks, and why. One without a name has to be removed from here.
EXCEPTIONS = {
    "evaluate/metrics/": "each metric lists the tasks that it scores",
    "smelt/data/read_rows.py": "a column of data sets on the Hub",
}


def named_tasks(source: str) -> Iterator[str]:
    """Yield the task names among the string constants of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in ALL_TASKS:
            yield f"line {node.lineno}: {node.value}"


def test_task_names_are_only_in_task_and_family_files() -> None:
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    files = {path.relative_to(ROOT).as_posix(): path for path in paths}
    problems_by_file = {
        name: problems
        for name, path in files.items()
        if not name.startswith(TASK_FILES) and (problems := list(named_tasks(path.read_text("utf-8"))))
    }
    assert {
        name: lines for name, lines in problems_by_file.items() if not name.startswith(tuple(EXCEPTIONS))
    } == {}
    assert [
        exception
        for exception in EXCEPTIONS
        if not any(name.startswith(exception) for name in problems_by_file)
    ] == []


def test_comparison_with_task_name_is_detected() -> None:
    assert list(named_tasks('if task == "translation": pass')) == ["line 1: translation"]


def test_every_task_has_traits_and_specification() -> None:
    assert tuple(TASK_TRAITS) == ALL_TASKS
    assert tuple(spec.name for spec in all_specs()) == ALL_TASKS
    assert all(type(spec).__module__ == f"smelt.tasks.{spec.name.replace('-', '_')}" for spec in all_specs())
    assert all(isinstance(spec, TaskSpec) for spec in all_specs())


def test_every_kind_of_output_has_a_score() -> None:
    outputs = {traits.output.replace("-", "_") for traits in TASK_TRAITS.values()}
    paths = (ROOT / "smelt" / "pipeline" / "execute" / "scores").glob("*.py")
    assert {path.stem for path in paths} - {"__init__", "base_scorer"} == outputs


def test_specifications_do_not_import_torch() -> None:
    code = (
        "import sys; from smelt.tasks.registry import all_specs; all_specs(); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_sample_nouns_are_singular() -> None:
    assert [spec.name for spec in all_specs() if spec.sample_noun.endswith("s")] == []
