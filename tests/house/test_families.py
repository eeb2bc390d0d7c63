"""What a family is called stands in its own file: everybody else asks smelt.models.families."""

import ast
from pathlib import Path

import pytest

from smelt.models.families.registry import FAMILIES
from tests.support.models import every_family

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "smelt" / "models" / "families"
SOURCES = sorted(
    path
    for folder in ("smelt", "compress", "export", "evaluate")
    for path in (ROOT / folder).rglob("*.py")
    if path.parent != HOME
)
# TensorRT's words for the sizes of a profile, the second of which is a family's name too
ENDS = "('min', 'opt', 'max')"


# the setting `clip` of quantize, which other tools call otherwise
SETTING_NAMES = {"smelt/pipeline/recipe/validation_errors.py": ["clip"]}


def named(text: str) -> list[str]:
    """The strings of `text` that are the name of a family, with their lines; docstrings may speak of them."""
    tree = ast.parse(text)
    end_tuples = [
        node for node in ast.walk(tree) if isinstance(node, ast.Tuple) and ast.unparse(node) == ENDS
    ]
    allowed = {element for node in end_tuples for element in node.elts}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in allowed)
    return [f"line {node.lineno}: {node.value!r}" for node in constants if node.value in FAMILIES]


def test_family_names_are_only_in_their_files() -> None:
    lines_by_name = {str(path.relative_to(ROOT)): named(path.read_text(encoding="utf-8")) for path in SOURCES}
    names_by_file = {
        path: [line.partition(": ")[2].strip("'") for line in lines]
        for path, lines in lines_by_name.items()
        if lines
    }
    assert names_by_file == SETTING_NAMES


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_on_models_page(name: str) -> None:
    page = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    assert f"(`{name}`" in page


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_has_file_and_tiny_model(name: str) -> None:
    assert (HOME / f"{name.replace('-', '_')}.py").is_file()
    assert name in every_family.MODELS
