"""Every declared dependency is used by the package, and every third-party import is declared."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = [
    path
    for folder in ("smelt", "compress", "export", "evaluate", "configs")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "phrases.py"  # writes the quickstart's data, with a development tool
]
# Import names of distributions that need not be installed here.
IMPORT_NAMES = {
    "onnxruntime": "onnxruntime",
    "onnxruntime-gpu": "onnxruntime",
    "pydantic": "pydantic_core",  # its other half, which it pins
    "swanlab": "swanlab",
    "tensorrt": "tensorrt",
    "tensorrt-cu13": "tensorrt",
    "trackio": "trackio",
    "wandb": "wandb",
}
# Imported by libraries: transformers trains with accelerate, torch.onnx.export translates with onnxscript.
NOT_IMPORTED = {"accelerate", "onnxscript"}


def distribution(requirement: str) -> str:
    """Return the normalized name of a requirement."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found
    return re.sub(r"[-_.]+", "-", found[0]).lower()


REQUIRED = {distribution(requirement) for requirement in PROJECT["dependencies"]}
OPTIONAL = {
    distribution(requirement)
    for extra, requirements in PROJECT["optional-dependencies"].items()
    if extra != "dev"
    for requirement in requirements
}


def imports_and_strings() -> tuple[dict[str, str], set[str]]:
    """Return each third-party module with a file that imports it, and all strings of the sources."""
    imported: dict[str, str] = {}
    strings: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.add(node.value)
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top != "smelt":
                    imported.setdefault(top, str(path.relative_to(ROOT)))
    return imported, strings


IMPORTED, STRINGS = imports_and_strings()
PROVIDERS = {name: {distribution(one) for one in found} for name, found in packages_distributions().items()}


def import_names(name: str) -> set[str]:
    """Return the modules of a distribution."""
    return {module for module, found in PROVIDERS.items() if name in found} | {IMPORT_NAMES.get(name, "")}


@pytest.mark.parametrize("name", sorted(REQUIRED | OPTIONAL))
def test_a_declared_dependency_is_used(name: str) -> None:
    # an optional one may be imported by another library, by its name
    used = import_names(name) & IMPORTED.keys() or (
        name in OPTIONAL and {name, *import_names(name)} & STRINGS
    )
    assert used or name in NOT_IMPORTED


@pytest.mark.parametrize("module", sorted(IMPORTED))
def test_an_import_is_declared(module: str) -> None:
    declared = {name for name in REQUIRED | OPTIONAL if module in import_names(name)}
    assert declared, f"{IMPORTED[module]} imports {module}"
