"""Read YAML by the core schema of YAML 1.2, with the line of every key and value.

PyYAML's composer creates the nodes; the values are built here. Supported are mappings, lists, strings,
numbers, true, false and null. As in YAML 1.2's core schema, `no` and `on` are strings and `1e-4` is a
number (https://yaml.org/spec/1.2.2/#103-core-schema).
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from smelt.core.errors import InputError

KeyPath: TypeAlias = tuple[str | int, ...]

MAX_BYTES = 1_000_000
# Aliases repeat a node; a few lines of them can expand to billions of nodes.
MAX_NODES = 20_000
MAX_DEPTH = 40
# JSON readers disagree about integers beyond 64 bits.
MAX_INTEGER = 2**63 - 1

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")
# `- distill` without a colon: YAML joins it with the next line into one string
_BARE_ITEM = re.compile(r"\s*- (?P<word>[\w-]+)\s*(#.*)?")
_NULL = ("", "~", "null", "Null", "NULL")
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class _Loader(yaml.SafeLoader):
    """Composes nodes only; the types of plain scalars are resolved in `_plain_scalar`."""

    # PyYAML's resolvers would turn `no` into False and 2024-01-01 into a date
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


@dataclass
class YamlDocument:
    """A YAML document as plain Python values, with line numbers and mistakes.

    lines: line number (from 1) of each key or list item, by path such as ("stages", 1, "prune").
    mistakes: (path, message, line, code) of duplicate keys, keys that are not strings, and invalid values.
    replaced_paths: paths of invalid values (not finite, too large) that were replaced by others.
    """

    name: str
    value: Any
    text: str = ""
    lines: dict[KeyPath, int] = field(default_factory=dict)
    mistakes: list[tuple[KeyPath, str, int, str]] = field(default_factory=list)
    replaced_paths: set[KeyPath] = field(default_factory=set)


def read_yaml(path: Path) -> YamlDocument:
    """Read the YAML file at `path`.

    Raises:
        InputError: the file cannot be read, is larger than 1 MB, or is not valid UTF-8 or YAML.
    """
    return parse_yaml(read_text_file(path), str(path))


def read_text_file(path: Path) -> str:
    """Return the text of a small file.

    Raises:
        InputError: the file cannot be read, is larger than 1 MB, or is not valid UTF-8.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(
            f"{path}: cannot read the file: {reason}.", code="unreadable-file", file=str(path)
        ) from error
    if len(raw) > MAX_BYTES:
        raise InputError(
            f"{path}: not a recipe: larger than {MAX_BYTES:,} bytes. Check the path.",
            code="recipe-too-large",
            file=str(path),
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}:{line}: not UTF-8 text. Save the file as UTF-8.",
            code="not-utf8",
            file=str(path),
            line=line,
        ) from error


def parse_yaml(text: str, name: str) -> YamlDocument:
    """Parse `text` and return the document. name: file name or option for messages.

    Raises:
        InputError: invalid YAML, more than one document, too large or too deeply nested.
    """
    if len(text) > MAX_BYTES:
        raise InputError(
            f"{name}: not a recipe: larger than {MAX_BYTES:,} bytes. Check the path.",
            code="recipe-too-large",
            file=name,
        )
    document = YamlDocument(name, None, text)
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        if node is not None:
            document.value = _NodeConverter(document).convert(node, (), 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise InputError(
            _yaml_message(name, text, error), code="invalid-yaml", file=name, line=line
        ) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise InputError(
            f"{name}:{line}: invalid YAML: the character {chr(int(error.character))!r} is not allowed. Remove"
            " it.",
            code="invalid-yaml",
            file=name,
            line=line,
        ) from error
    except yaml.YAMLError as error:
        raise InputError(f"{name}: invalid YAML: {error}", code="invalid-yaml", file=name) from error
    except RecursionError as error:
        raise InputError(
            _too_deep_text(name),
            code="recipe-too-deep",
            file=name,
        ) from error
    except (ValueError, IndexError, OverflowError) as error:
        # PyYAML's scanner does not catch all of these, for example for \U escapes beyond Unicode
        raise InputError(f"{name}: invalid YAML: {error}", code="invalid-yaml", file=name) from error
    return document


def _too_deep_text(name: str) -> str:
    return f"{name}: not a recipe: nested more than {MAX_DEPTH} levels deep."


def _yaml_message(name: str, text: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}" if mark else name
    problem = error.problem or "cannot be parsed"
    if error.context:
        problem = f"{problem} ({error.context})"
    hint = " Indent with spaces, not tabs." if "'\\t'" in problem else ""
    lines = text.splitlines()[: mark.line] if mark else []
    above = next((line for line in reversed(lines) if line.partition("#")[0].strip()), "")
    nested = problem.startswith("mapping values") or "<block mapping start>" in problem
    if nested and (item := _BARE_ITEM.fullmatch(above)):
        hint = (
            f" End the line above with a colon (`- {item['word']}:`) and indent the settings more than the"
            " stage."
        )
    return f"{where}: invalid YAML: {problem}.{hint}"


class _NodeConverter:
    """Converts nodes to plain values and records line numbers."""

    def __init__(self, document: YamlDocument) -> None:
        self.document = document
        self.count = 0

    def convert(self, node: yaml.Node, path: KeyPath, depth: int) -> Any:
        self.count += 1
        if self.count > MAX_NODES:
            raise InputError(
                f"{self.document.name}: more than {MAX_NODES:,} values after expanding aliases (*name)."
                " Use fewer aliases.",
                code="recipe-too-large",
                file=self.document.name,
            )
        if depth > MAX_DEPTH:
            raise InputError(
                _too_deep_text(self.document.name), code="recipe-too-deep", file=self.document.name
            )
        self.document.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            self._expect_tag(node, path, "map")
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            self._expect_tag(node, path, "seq")
            return [self.convert(child, (*path, i), depth + 1) for i, child in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)  # the composer creates no other node types
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key: Hashable = self._scalar(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
            if path and type(key) is int:  # such as the number of a layer; keys of the recipe are strings
                key = str(key)
            if not isinstance(key, str):
                read = repr(key_node.value)[:60] if isinstance(key_node, yaml.ScalarNode) else "a structure"
                self._note_mistake(path, f"a key must be a string, got {read}.", line, "wrong-key")
                continue
            if key in out:
                first = self.document.lines[(*path, key)]
                text = f"duplicate key, first in line {first}. Remove one."
                self._note_mistake((*path, key), text, line, "duplicate-key")
                continue
            self.document.lines[(*path, key)] = line
            out[key] = self.convert(value_node, (*path, key), depth + 1)
        return out

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        text: str = node.value
        # every untagged scalar has the tag `str`; only plain style may be a number
        self._expect_tag(node, path, "str")
        if any("\ud800" <= c <= "\udfff" for c in text):
            self._note_replaced(
                path, "a lone surrogate is not a valid character. Remove it.", line, "lone-surrogate"
            )
            return ""
        if node.style is not None:
            return text
        return self._plain_scalar(text, path, line)

    def _plain_scalar(self, text: str, path: KeyPath, line: int) -> Any:
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if _NOT_FINITE.match(text):
            self._note_replaced(path, f"expected a finite number, got {text}.", line, "not-finite")
            return 0.0
        if _INT.match(text) or _FLOAT.match(text):
            return self._number(text, path, line)
        return text

    def _number(self, text: str, path: KeyPath, line: int) -> int | float:
        digits = text.replace("_", "")
        number: int | float = float(digits)
        if _INT.match(text) and abs(number) < MAX_INTEGER:
            return int(digits)
        if _INT.match(text) or not math.isfinite(number):
            self._note_replaced(path, f"number too large: {text[:40]}.", line, "number-too-large")
            return 0
        return number

    def _expect_tag(self, node: yaml.Node, path: KeyPath, tag: str) -> None:
        if node.tag not in (f"{_TAG}{tag}", "!"):
            self._note_mistake(
                path,
                f"unsupported YAML tag {node.tag[:60]!r}. Remove it.",
                node.start_mark.line + 1,
                "unsupported-tag",
            )

    def _note_replaced(self, path: KeyPath, message: str, line: int, code: str) -> None:
        self.document.replaced_paths.add(path)
        self._note_mistake(path, message, line, code)

    def _note_mistake(self, path: KeyPath, message: str, line: int, code: str) -> None:
        self.document.mistakes.append((path, message, line, code))
