"""Dependencies point one way: core <- data <- ... <- compress, export, evaluate <- pipeline <- cli."""

import ast
from collections.abc import Callable, Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
# Each of these imports only those before it. `stage` is the file smelt/stage.py.
BASE_ORDER = (
    "core", "data", "stage", "quantization", "models", "generation", "runtimes", "tasks", "calibration",
    "training",
)  # fmt: skip
BASE = set(BASE_ORDER)
USERS = {"compress", "export", "evaluate"}
MAY_IMPORT = {
    **{name: set(BASE_ORDER[: place + 1]) for place, name in enumerate(BASE_ORDER)},
    **{name: BASE | {name} for name in USERS}, "configs": {"configs"},
    "pipeline": BASE | USERS | {"configs", "pipeline"}, "api": BASE | USERS | {"configs", "pipeline", "api"},
    "cli": BASE | USERS | {"configs", "pipeline", "api", "cli", "smelt"},
    "smelt": BASE | USERS | {"configs", "pipeline", "api", "cli", "smelt"},  # __init__.py and __main__.py
}  # fmt: skip
MAPPED = ("compress", "export", "evaluate", "configs")
SOURCES = sorted(path for folder in ("smelt", *MAPPED) for path in (ROOT / folder).rglob("*.py"))
UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    "torch.load", "yaml.load", "yaml.unsafe_load", "os.system", "eval", "exec",
}  # fmt: skip
CHILD_PROCESS = ROOT / "smelt" / "core" / "system.py"
FORBIDDEN_KEYWORDS = {"trust_remote_code", "shell", "allow_pickle"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that `tree` imports; `from a import b` gives a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.level == 0)


def layer(name: str) -> str:
    """The part of smelt that a dotted name below `smelt` belongs to."""
    second = name.split(".")[1] if "." in name else ""
    return second if second in MAY_IMPORT else "smelt"


def folder_of(path: Path) -> str:
    """The part of smelt that a file belongs to."""
    first, *rest = path.relative_to(ROOT).with_suffix("").parts
    return layer(f"smelt.{rest[0]}") if first == "smelt" else first


def bad_calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in FORBIDDEN_CALLS:
            yield f"line {node.lineno}: {called}(...)"
        for keyword in node.keywords:
            off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in FORBIDDEN_KEYWORDS and not off:
                yield f"line {node.lineno}: {keyword.arg}={ast.unparse(keyword.value)}"


def layer_breaks(folder: str, tree: ast.AST) -> list[str]:
    """What a module of `folder` imports of smelt and may not."""
    own_modules = {name for name in imported(tree) if name.split(".")[0] == "smelt"}
    # `from smelt.core import x` yields smelt.core and smelt.core.x: each says its layer itself.
    return sorted(name for name in own_modules if layer(name) not in MAY_IMPORT[folder])


def test_every_folder_has_sources() -> None:
    assert {folder_of(path) for path in SOURCES} == set(MAY_IMPORT)


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.AST]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def offenders(
    trees: dict[Path, ast.AST], rule: Callable[[Path, ast.AST], Iterable[str]]
) -> dict[str, list[str]]:
    """What a rule finds, by file."""
    lines_by_file = {name_of(path): list(rule(path, tree)) for path, tree in trees.items()}
    return {name: problems for name, problems in lines_by_file.items() if problems}


def bare_or_relative(tree: ast.AST) -> list[str]:
    """Folders that are imported by their bare names, and relative imports."""
    return [name for name in imported(tree) if name.split(".")[0] in MAPPED or name.startswith(".")]


def foreign_code(tree: ast.AST) -> list[str]:
    """What unpickles or runs what others wrote."""
    return [name for name in imported(tree) if name.split(".")[0] in UNPICKLERS] + list(bad_calls(tree))


def test_modules_import_only_lower_layers(trees: dict[Path, ast.AST]) -> None:
    assert offenders(trees, lambda path, tree: layer_breaks(folder_of(path), tree)) == {}


@pytest.mark.parametrize("folder", sorted(USERS))
def test_techniques_import_each_other_without_cycles(trees: dict[Path, ast.AST], folder: str) -> None:
    """The packages and modules of a folder have an order; imports inside of functions count too."""
    imports: dict[str, set[str]] = {}
    for path, tree in trees.items():
        components = path.relative_to(ROOT).with_suffix("").parts
        if components[0] == folder:
            used = {n.split(".")[2] for n in imported(tree) if n.startswith(f"smelt.{folder}.")}
            imports.setdefault(components[1], set()).update(used - {components[1]})
    list(TopologicalSorter(imports).static_order())  # raises CycleError


def test_modules_use_absolute_imports(trees: dict[Path, ast.AST]) -> None:
    assert offenders(trees, lambda path, tree: bare_or_relative(tree)) == {}


def test_modules_do_not_unpickle_or_run_third_party_code(trees: dict[Path, ast.AST]) -> None:
    assert offenders(trees, lambda path, tree: foreign_code(tree)) == {}


def unsafe_children(path: Path, tree: ast.AST) -> list[str]:
    """Where Python is started otherwise than by `python_command`."""
    line_numbers = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "executable"
    ]
    return [] if path == CHILD_PROCESS else [f"line {line}: sys.executable" for line in line_numbers]


def test_python_children_use_safe_path(trees: dict[Path, ast.AST]) -> None:
    """`-m` and `-c` put the current folder first on sys.path; `python_command` does without."""
    assert offenders(trees, unsafe_children) == {}
    assert unsafe_children(ROOT / "a.py", ast.parse("import sys\nrun([sys.executable, '-c', code])"))


@pytest.mark.parametrize("text", [
    "torch.load(path)", "yaml.load(text)", "run(command, shell=True)", "f(trust_remote_code=True)", "eval(x)",
])  # fmt: skip
def test_forbidden_call_is_detected(text: str) -> None:
    assert len(list(bad_calls(ast.parse(text)))) == 1
