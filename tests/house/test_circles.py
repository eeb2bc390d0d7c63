"""No two files of smelt import each other, however far round: what both need stands below both.

An import counts wherever it stands (in a function, under TYPE_CHECKING), and so does a text that names a
module, as a table of lazy imports has them: moving an import into a function hides a circle and mends none.
"""

import ast
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_DIR = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
    "package-dir"
]
NAMED = re.compile(r"(smelt(?:\.\w+)+)(?::\w+)?")


@cache
def sources() -> dict[str, str]:
    """The text of every module of smelt by its dotted name."""
    sources_by_module = {}
    for package, folder in PACKAGE_DIR.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            components = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *components]).removesuffix(".__init__")
            sources_by_module[name] = path.read_text(encoding="utf-8")
    return sources_by_module


@cache
def named(text: str) -> list[tuple[str, ...]]:
    """What a module imports or names, each with what it may be instead: (a.b, a) for `from a import b`."""
    module_parts: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            module_parts += [(alias.name,) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            module_parts += [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
        elif isinstance(node, ast.Constant) and (match := NAMED.fullmatch(str(node.value))):
            module_parts.append((match[1],))
    return module_parts


def imports(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """For each module those of the others that it imports."""
    return {
        name: {
            first
            for choices in named(text)
            if (first := next((choice for choice in choices if choice in modules), name)) != name
        }
        for name, text in modules.items()
    }


def circle(modules: Mapping[str, str]) -> list[str]:
    """One circle of imports, its first name again at its end; nothing where there is none."""
    try:
        TopologicalSorter(imports(modules)).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # graphlib lists them from what is imported to what imports it
    return []


def test_modules_have_no_import_cycle() -> None:
    assert " -> ".join(circle(sources())) == "", "give what they share a file of its own, below them"


@pytest.mark.parametrize("back", [
    "import smelt.a", "from smelt import a", "from smelt.a import f", "def g():\n    from smelt.a import f",
    "if TYPE_CHECKING:\n    from smelt.a import f", "TABLE = {'f': 'smelt.a:f'}", "import_module('smelt.a')",
])  # fmt: skip
def test_import_cycle_is_detected(back: str) -> None:
    modules = {"smelt": "", "smelt.a": "from smelt.b import g", "smelt.b": "from smelt.c import h"}
    assert circle(modules | {"smelt.c": ""}) == []
    cycle = circle(modules | {"smelt.c": back})
    assert (cycle[0], set(cycle)) == (cycle[-1], {"smelt.a", "smelt.b", "smelt.c"})
    graph = imports(modules | {"smelt.c": back})
    assert all(after in graph[before] for before, after in pairwise(cycle))
