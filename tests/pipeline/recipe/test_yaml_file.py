"""Reading YAML with lines, and nothing that surprises."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from smelt.core.errors import InputError
from smelt.pipeline.recipe.yaml_file import MAX_BYTES, dump_yaml, parse_yaml, read_yaml
from tests.support.expected_errors import raises_code

pytestmark = pytest.mark.quick


def test_parse_yaml_records_line_of_every_node() -> None:
    document = parse_yaml("a: 1\nb:\n  - x: 2\n    y: 3\n  - 4\n", "r.yaml")
    assert document.value == {"a": 1, "b": [{"x": 2, "y": 3}, 4]}
    assert document.lines[("a",)] == 1
    assert document.lines[("b", 0, "y")] == 4
    assert document.lines[("b", 1)] == 5


@pytest.mark.parametrize(("text", "expected"), [
    ("1e-4", 1e-4), ("5e-5", 5e-5), ("1_000", 1000), ("-3", -3), (".5", 0.5), ("1.", 1.0), ("007", 7),
    ("true", True), ("no", "no"), ("on", "on"), ("2024-01-01", "2024-01-01"), ("12:30", "12:30"), ("~", None),
    ("", None), ("'1'", "1"), ('"true"', "true"), ("0x10", 16), ("0o17", 15), ("rougeL", "rougeL"),
])  # fmt: skip
def test_scalars_follow_core_schema(text: str, expected: object) -> None:
    value = parse_yaml(f"a: {text}", "r").value["a"]
    assert value == expected
    assert type(value) is type(expected)


def test_duplicate_key_is_error_with_both_lines() -> None:
    document = parse_yaml("seed: 1\nmodel: m\nseed: 2\n", "r")
    [(path, text, line, code)] = document.errors
    assert (path, line, code) == (("seed",), 3, "duplicate-key")
    assert "line 1" in text
    assert document.value["seed"] == 1


@pytest.mark.parametrize(("text", "code", "read"), [
    ("a: .nan", "not-finite", ".nan"), ("a: 1e999", "number-too-large", "1e999"),
    (f"a: {'9' * 5000}", "number-too-large", f": {'9' * 40}."), ("1: a", "wrong-key", "'1'"),
    ("[a]: b", "wrong-key", ""), ("a: !!python/name:os.system x", "unsupported-tag", "os.system"),
    ('a: "\\ud800"', "lone-surrogate", ""),
])  # fmt: skip
def test_unsupported_yaml_values_are_errors(text: str, code: str, read: str) -> None:
    [(_, message, line, kind)] = parse_yaml(text, "r").errors
    assert (kind, line) == (code, 1)
    assert read in message


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize(("text", "code", "line", "named"), [
    ("a:\n\tb: 1", "invalid-yaml", 2, "'\\t'"), ("a: b: c", "invalid-yaml", 1, ""),
    ("- a\n  b: 1", "invalid-yaml", 2, "`- a:`"),
    ("x:\n  - a-b # c\n\n    # d\n    c: 1", "invalid-yaml", 5, "`- a-b:`"),
    ("a: 1\n---\nb: 2", "invalid-yaml", 2, ""), ("a: [1, 2", "invalid-yaml", 1, ""),
    ("a: *b", "invalid-yaml", 1, "'b'"), ("a\x00b", "invalid-yaml", 1, "'\\x00'"),
    ('a: "\\UFFFFFFFF"', "invalid-yaml", None, ""), (BOMB, "recipe-too-large", None, "20,000"),
    ("&a [*a]", "recipe-too-deep", None, "40"), ("[" * 5_000, "recipe-too-deep", None, "40"),
    ("x" * (MAX_BYTES + 1), "recipe-too-large", None, "1,000,000"),
])  # fmt: skip
def test_invalid_yaml_is_rejected(text: str, code: str, line: int | None, named: str) -> None:
    with raises_code(code, InputError) as excinfo:
        parse_yaml(text, "r")
    assert (excinfo.value.file, excinfo.value.line) == ("r", line)
    assert named in str(excinfo.value)


def test_read_yaml_reports_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    with raises_code("unreadable-file", InputError) as excinfo:
        read_yaml(path)
    assert excinfo.value.file == str(path)
    path.write_bytes(b"a: 1\nb: \xff\n")
    with raises_code("not-utf8", InputError) as excinfo:
        read_yaml(path)
    assert (excinfo.value.file, excinfo.value.line) == (str(path), 2)
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with raises_code("recipe-too-large", InputError):
        read_yaml(path)
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(path).value == {"a": 1}


@settings(max_examples=80, deadline=None)
@given(st.text())
def test_any_text_is_parsed_or_raises_input_error(text: str) -> None:
    # anything but an InputError ends the test
    with contextlib.suppress(InputError):
        assert parse_yaml(text, "r").text == text


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text("abcxyz -:#'\"é"),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(_PLAIN)
def test_dumped_yaml_is_read_equally_by_ruamel(value: object) -> None:
    text = dump_yaml(value)
    document = parse_yaml(text, "r")
    assert document.value == YAML(typ="safe").load(text) == value
    assert document.errors == []
