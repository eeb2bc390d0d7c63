"""A scheme is one file: nobody else knows its name, and whoever must speak of it does."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from smelt.quantization.schemes.registry import (
    SCHEMES,
    bits_per_weight,
    default_options,
    format_option_value,
    schemes_by_option,
)
from tools import settings_tables

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("smelt", "compress", "export", "evaluate")
HOME = ROOT / "smelt" / "quantization" / "schemes"
SOURCES = sorted(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))
PAGE = (ROOT / "docs" / "reference" / "stages" / "quantize.md").read_text(encoding="utf-8")
# names that are also words of ONNX and TensorRT for the types of elements
TYPES = {
    "export/tensorrt/value_rules.py": {"int2"},
    "export/tensorrt/engine_summary.py": {"fp8", "int4"},
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def named(text: str) -> Iterator[str]:
    """The schemes that a source names; texts may."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in SCHEMES:
            yield node.value


def rows(page: str, first: str) -> dict[str, list[str]]:
    """The rows of the table whose head begins with `first`, by their first cell, without marks."""
    table = page.split(f"\n|{first}|", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [line.strip("|").split("|") for line in table]
    return {re.sub(r"\[?`([^`]*)`.*", r"\1", row[0]): row[1:] for row in cells}


def test_scheme_names_are_only_in_their_files() -> None:
    names_by_file = {}
    for path in SOURCES:
        own_schemes = {
            name for name, scheme in SCHEMES.items() if type(scheme).__module__.endswith(f".{path.stem}")
        }
        names_by_file[name_of(path)] = set(named(path.read_text(encoding="utf-8"))) - (
            own_schemes if path.parent == HOME else set()
        )
    assert {name: others for name, others in names_by_file.items() if others - TYPES.get(name, set())} == {}


@pytest.mark.parametrize("name", SCHEMES)
def test_page_has_row_and_section_for_every_scheme(name: str) -> None:
    row = rows(PAGE, "scheme")[name]
    bits = re.match(r"[\d.]+", row[1])
    assert bits, f"{name}: bits a weight in the second column"
    assert float(bits[0]) == pytest.approx(
        bits_per_weight(SCHEMES[name], default_options(SCHEMES[name])), abs=0.02
    )
    assert f"\n## {name}\n" in PAGE
    assert all(operator in row[-1] for operator in SCHEMES[name].operators)


def test_option_row_names_its_schemes_and_defaults() -> None:
    descriptions = {path: setting.description for path, setting, _ in settings_tables.rows("quantize")}
    for name, options in schemes_by_option().items():
        defaults_named = re.findall(r"default (\w+)", descriptions[name])
        assert set(defaults_named) == {format_option_value(option.default) for _, option in options}
        assert all(scheme.name in descriptions[name] for scheme, _ in options)
