"""Reading YAML with lines, and nothing that surprises."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from smelt.core.errors import InputError
from smelt.recipe.yaml_file import MAX_BYTES, parse_yaml, read_yaml


def test_parse_yaml_knows_the_line_of_every_part() -> None:
    document = parse_yaml("a: 1\nb:\n  - x: 2\n    y: 3\n  - 4\n", "r.yaml")
    assert document.value == {"a": 1, "b": [{"x": 2, "y": 3}, 4]}
    assert document.lines[("a",)] == 1
    assert document.lines[("b", 0, "y")] == 4
    assert document.lines[("b", 1)] == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-4", 1e-4),
        ("5e-5", 5e-5),
        ("1_000", 1000),
        ("-3", -3),
        (".5", 0.5),
        ("1.", 1.0),
        ("007", 7),
        ("true", True),
        ("no", "no"),
        ("on", "on"),
        ("2024-01-01", "2024-01-01"),
        ("12:30", "12:30"),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ('"true"', "true"),
        ("0x10", "0x10"),
        ("rougeL", "rougeL"),
    ],
)
def test_scalars_follow_the_core_schema(text: str, expected: object) -> None:
    value = parse_yaml(f"a: {text}", "r").value["a"]
    assert value == expected
    assert type(value) is type(expected)


def test_duplicate_key_is_a_mistake_with_both_lines() -> None:
    document = parse_yaml("seed: 1\nmodel: m\nseed: 2\n", "r")
    assert document.mistakes == [(("seed",), "this key is given twice, first in line 1. Keep one.", 3)]
    assert document.value["seed"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: .nan", "expected a finite number, read .nan."),
        ("a: 1e999", "this number is too large: 1e999."),
        (f"a: {'9' * 5000}", f"this number is too large: {'9' * 40}."),
        ("1: a", "a key must be a word, read '1'."),
        ("[a]: b", "a key must be a word, read a structure."),
        ("a: !!python/name:os.system x", "is not used in recipes"),
        ('a: "\\ud800"', "half of a surrogate pair"),
    ],
)
def test_odd_values_are_mistakes(text: str, message: str) -> None:
    [(_, found, line)] = parse_yaml(text, "r").mistakes
    assert message in found
    assert line == 1


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n\tb: 1", "r:2: not valid YAML: found character '\\t' that cannot start any token"),
        ("a: b: c", "r:1: not valid YAML: mapping values are not allowed here"),
        (
            "- a\n  b: 1",
            "r:2: not valid YAML: mapping values are not allowed here. With something below it, the",
        ),
        ("x:\n  - a-b # c\n\n    # d\n    c: 1", "the line above ends with a colon (`- a-b:`); settings"),
        ("a: 1\n---\nb: 2", "r:2: not valid YAML"),
        ("a: [1, 2", "not valid YAML"),
        ("a: *b", "undefined alias 'b'"),
        ("a\x00b", "r:1: not valid YAML: the character '\\x00' is not allowed"),
        ('a: "\\UFFFFFFFF"', "not valid YAML"),
        (BOMB, "more than 20,000 values"),
        ("&a [*a]", "nested more than 40 levels"),
        ("[" * 5_000, "nested more than 40 levels"),
        ("x" * (MAX_BYTES + 1), "larger than 1,000,000 bytes"),
    ],
)
def test_what_is_no_yaml_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "r")
    assert message in str(caught.value)


def test_read_yaml_says_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    with pytest.raises(InputError, match=r"r\.yaml: cannot be read: No such file"):
        read_yaml(path)
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(InputError, match=r"r\.yaml:2: not UTF-8 text"):
        read_yaml(path)
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(InputError, match="larger than 1,000,000 bytes"):
        read_yaml(path)
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(path).value == {"a": 1}


@settings(max_examples=80, deadline=None)
@given(st.text())
def test_any_text_gives_a_document_or_an_input_error(text: str) -> None:
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
def test_what_pyyaml_writes_is_read_back(value: object) -> None:
    document = parse_yaml(yaml.safe_dump(value, allow_unicode=True), "r")
    assert document.value == value
    assert document.mistakes == []
