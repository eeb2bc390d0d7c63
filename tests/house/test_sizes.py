"""Files, functions and signatures are short, and no closure hides the algorithm of the function around it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for folder in ("smelt", "compress", "export", "evaluate") for path in (ROOT / folder).rglob("*.py")
)
MAX_LINES = 600  # of a file
MAX_STATEMENTS, MAX_PARAMETERS, MAX_CLOSURE_STATEMENTS = 80, 10, 15
# Names that say neither what a function returns nor what it does.
VAGUE_NAMES = {"at", "coder_of", "decide", "fit", "of"}

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[FunctionNode]:
    return (node for node in ast.walk(tree) if isinstance(node, FunctionNode))


def num_statements(function: FunctionNode) -> int:
    """The statements inside of a function, those of closures included."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1


def num_parameters(function: FunctionNode) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)


def is_command(function: FunctionNode) -> bool:
    """Whether click calls the function, with an argument for each option of the command."""
    decorators = [node.func if isinstance(node, ast.Call) else node for node in function.decorator_list]
    return any(isinstance(node, ast.Attribute) and node.attr == "command" for node in decorators)


def long_functions(tree: ast.AST, of_public_api: bool = False) -> list[str]:
    """Functions with too many statements or parameters.

    Two kinds have as many parameters as a command has options, each set by name: click commands, which get
    their options so, and the functions of `import smelt` (`of_public_api`), whose options are keyword-only.
    """
    problems = []
    for function in functions(tree):
        if (count := num_statements(function)) > MAX_STATEMENTS:
            problems.append(f"line {function.lineno}: {function.name}: {count} statements")
        count = num_parameters(function)
        if of_public_api:
            count -= len(function.args.kwonlyargs)
        if count > MAX_PARAMETERS and not is_command(function):
            problems.append(f"line {function.lineno}: {function.name}: {count} parameters")
    return problems


def opaque_closures(tree: ast.AST) -> list[str]:
    """Functions inside of functions that are long, or whose names say nothing."""
    problems = {}
    for outer in functions(tree):
        for inner in functions(outer):
            is_long = num_statements(inner) > MAX_CLOSURE_STATEMENTS
            if inner is not outer and (is_long or inner.name in VAGUE_NAMES):
                problems[inner.lineno] = f"line {inner.lineno}: {outer.name}.{inner.name}"
    return list(problems.values())


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.AST]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def test_files_have_few_lines() -> None:
    num_lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {str(path.relative_to(ROOT)): n for path, n in num_lines.items() if n > MAX_LINES} == {}


def test_functions_have_few_statements_and_parameters(trees: dict[Path, ast.AST]) -> None:
    api = ROOT / "smelt" / "__init__.py"
    functions_by_file = {
        str(path.relative_to(ROOT)): long_functions(tree, path == api) for path, tree in trees.items()
    }
    assert {name: problems for name, problems in functions_by_file.items() if problems} == {}


def test_closures_are_short_and_named(trees: dict[Path, ast.AST]) -> None:
    functions_by_file = {str(path.relative_to(ROOT)): opaque_closures(tree) for path, tree in trees.items()}
    assert {name: problems for name, problems in functions_by_file.items() if problems} == {}


def test_long_functions_and_opaque_closures_are_detected() -> None:
    names = ", ".join(f"p{number}" for number in range(MAX_PARAMETERS + 1))
    many = "\n".join(["    pass"] * (MAX_STATEMENTS + 1))
    assert len(long_functions(ast.parse(f"def f({names}): pass\ndef g():\n{many}"))) == 2
    assert long_functions(ast.parse(f"@main.command()\ndef f({names}): pass")) == []
    assert long_functions(ast.parse(f"def f(*, {names}): pass"), of_public_api=True) == []
    assert len(long_functions(ast.parse(f"def f({names}): pass"), of_public_api=True)) == 1
    body = "\n".join(["        pass"] * (MAX_CLOSURE_STATEMENTS + 1))
    assert len(opaque_closures(ast.parse(f"def f():\n    def of(): pass\n    def g():\n{body}"))) == 2
