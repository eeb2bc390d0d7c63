"""Every declared dependency is used by the package, and every third-party import is declared."""

import ast
import functools
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

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
    "ai-edge-litert": "ai_edge_litert", "compressed-tensors": "compressed_tensors",
    "deepspeed": "deepspeed", "executorch": "executorch",
    "litert-torch": "litert_torch", "ncnn": "ncnn", "onnxruntime": "onnxruntime",
    "onnxruntime-gpu": "onnxruntime", "pnnx": "pnnx",
    "pydantic": "pydantic_core",  # its other half, which it pins
    "swanlab": "swanlab", "tensorrt": "tensorrt", "tensorrt-cu13": "tensorrt", "trackio": "trackio",
    "wandb": "wandb",
}  # fmt: skip
# torch.onnx.export translates with it.
NOT_IMPORTED = {"onnxscript"}


def distribution(requirement: str) -> str:
    """Return the normalized name of a requirement."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match[0]).lower()


REQUIRED = {distribution(requirement) for requirement in PROJECT["dependencies"]}
OPTIONAL = {
    distribution(requirement)
    for extra, requirements in PROJECT["optional-dependencies"].items()
    if extra != "dev"
    for requirement in requirements
}


@functools.cache
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


PROVIDERS = {name: {distribution(one) for one in found} for name, found in packages_distributions().items()}


def import_names(name: str) -> set[str]:
    """Return the modules of a distribution."""
    return {module for module, distributions in PROVIDERS.items() if name in distributions} | {
        IMPORT_NAMES.get(name, "")
    }


def is_used(name: str) -> bool:
    """Whether a distribution is imported; an optional one may be imported by another library, by its name."""
    imported, strings = imports_and_strings()
    names = import_names(name)
    return bool(names & imported.keys() or (name in OPTIONAL and {name, *names} & strings))


def test_declared_dependencies_are_used() -> None:
    assert [name for name in sorted(REQUIRED | OPTIONAL) if not is_used(name)] == sorted(NOT_IMPORTED)


def test_imports_are_declared() -> None:
    declared = {module for name in REQUIRED | OPTIONAL for module in import_names(name)}
    imported = imports_and_strings()[0]
    assert {module: file for module, file in imported.items() if module not in declared} == {}
