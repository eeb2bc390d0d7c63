"""YAML with the line of every key and value, and nothing that YAML can do to surprise.

PyYAML's composer gives the nodes; the values are built here. Only what a recipe needs is read, by
the rules of YAML 1.2's core schema (`no` and `on` are texts, `1e-4` is a number,
https://yaml.org/spec/1.2.2/#103-core-schema): mappings, lists, texts, numbers, true, false, null.
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

Where: TypeAlias = tuple[str | int, ...]

MAX_BYTES = 1_000_000
# Aliases may repeat a node; a few lines of them can stand for billions of nodes.
MAX_NODES = 20_000
MAX_DEPTH = 40
# Whole numbers beyond 64 bits have no use in a recipe, and JSON readers disagree about them.
MAX_WHOLE = 2**63 - 1

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")
# `- distill`, which a line below makes a text of several lines
_BARE_ITEM = re.compile(r"\s*- (?P<word>[\w-]+)\s*(#.*)?")
_NULL = ("", "~", "null", "Null", "NULL")
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class _Loader(yaml.SafeLoader):
    """Composes nodes only; untagged plain scalars are told apart in `_plain`."""

    # one table for all plain scalars would turn `no` into False and 2024-01-01 into a date
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


@dataclass
class Document:
    """A YAML text as plain Python, where each part of it stands, and what is wrong with it.

    lines: the line (from 1) of each key or list item, by its path such as ("stages", 1, "prune").
    mistakes: (path, message, line, code) of duplicate keys, of keys that are not words, of odd values.
    replaced: the paths of values that are none (not finite, too large), in whose place others stand.
    """

    name: str
    value: Any
    text: str = ""
    lines: dict[Where, int] = field(default_factory=dict)
    mistakes: list[tuple[Where, str, int, str]] = field(default_factory=list)
    replaced: set[Where] = field(default_factory=set)


def read_yaml(path: Path) -> Document:
    """Read the YAML file at `path`.

    Raises:
        InputError: the file cannot be read, is larger than 1 MB, is not UTF-8 or not YAML.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(
            f"{path}: cannot be read: {reason}.", code="unreadable-file", file=str(path)
        ) from error
    if len(raw) > MAX_BYTES:
        raise InputError(
            f"{path}: larger than {MAX_BYTES:,} bytes, so it is not a recipe.",
            code="recipe-too-large",
            file=str(path),
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}:{line}: not UTF-8 text. Save the file as UTF-8.",
            code="not-utf8",
            file=str(path),
            line=line,
        ) from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> Document:
    """Parse `text`; `name` is what messages call it.

    Raises:
        InputError: not YAML, more than one document, nested or repeated beyond reason.
    """
    if len(text) > MAX_BYTES:
        raise InputError(
            f"{name}: larger than {MAX_BYTES:,} bytes, so it is not a recipe.",
            code="recipe-too-large",
            file=name,
        )
    document = Document(name, None, text)
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        if node is not None:
            document.value = _Builder(document).build(node, (), 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise InputError(
            _yaml_message(name, text, error), code="invalid-yaml", file=name, line=line
        ) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise InputError(
            f"{name}:{line}: not valid YAML: the character {chr(int(error.character))!r} is not allowed.",
            code="invalid-yaml",
            file=name,
            line=line,
        ) from error
    except yaml.YAMLError as error:
        raise InputError(f"{name}: not valid YAML: {error}", code="invalid-yaml", file=name) from error
    except RecursionError as error:
        raise InputError(
            f"{name}: nested more than {MAX_DEPTH} levels deep, so it is not a recipe.",
            code="recipe-too-deep",
            file=name,
        ) from error
    except (ValueError, IndexError, OverflowError) as error:
        # PyYAML's scanner lets a few of these through, for example for \U escapes beyond Unicode
        raise InputError(f"{name}: not valid YAML: {error}", code="invalid-yaml", file=name) from error
    return document


def _too_deep(name: str) -> str:
    return f"{name}: nested more than {MAX_DEPTH} levels deep, so it is not a recipe."


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
            f" With something below it, the line above ends with a colon (`- {item['word']}:`); settings"
            " are indented more than that word."
        )
    return f"{where}: not valid YAML: {problem}.{hint}"


class _Builder:
    """Turns nodes into plain values and notes the lines."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.count = 0

    def build(self, node: yaml.Node, path: Where, depth: int) -> Any:
        self.count += 1
        if self.count > MAX_NODES:
            raise InputError(
                f"{self.document.name}: more than {MAX_NODES:,} values once its aliases (*name) are"
                " expanded.",
                code="recipe-too-large",
                file=self.document.name,
            )
        if depth > MAX_DEPTH:
            raise InputError(_too_deep(self.document.name), code="recipe-too-deep", file=self.document.name)
        self.document.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            self._expect_tag(node, path, "map")
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            self._expect_tag(node, path, "seq")
            return [self.build(child, (*path, i), depth + 1) for i, child in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)  # the composer knows no fourth kind
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Where, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key: Hashable = self._scalar(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
            if path and type(key) is int:  # a layer, say; at the top there are words alone
                key = str(key)
            if not isinstance(key, str):
                read = repr(key_node.value)[:60] if isinstance(key_node, yaml.ScalarNode) else "a structure"
                self._note(path, f"a key must be a word, read {read}.", line, "wrong-key")
                continue
            if key in out:
                first = self.document.lines[(*path, key)]
                text = f"this key is given twice, first in line {first}. Keep one."
                self._note((*path, key), text, line, "duplicate-key")
                continue
            self.document.lines[(*path, key)] = line
            out[key] = self.build(value_node, (*path, key), depth + 1)
        return out

    def _scalar(self, node: yaml.ScalarNode, path: Where) -> Any:
        line = node.start_mark.line + 1
        text: str = node.value
        # the resolver gives every untagged scalar the tag of texts; only plain style may be a number
        self._expect_tag(node, path, "str")
        if any("\ud800" <= c <= "\udfff" for c in text):
            self._replace(path, "half of a surrogate pair is not a character.", line, "lone-surrogate")
            return ""
        if node.style is not None:
            return text
        return self._plain(text, path, line)

    def _plain(self, text: str, path: Where, line: int) -> Any:
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if _NOT_FINITE.match(text):
            self._replace(path, f"expected a finite number, read {text}.", line, "not-finite")
            return 0.0
        if _INT.match(text) or _FLOAT.match(text):
            return self._number(text, path, line)
        return text

    def _number(self, text: str, path: Where, line: int) -> int | float:
        digits = text.replace("_", "")
        number: int | float = float(digits)
        if _INT.match(text) and abs(number) < MAX_WHOLE:
            return int(digits)
        if _INT.match(text) or not math.isfinite(number):
            self._replace(path, f"this number is too large: {text[:40]}.", line, "number-too-large")
            return 0
        return number

    def _expect_tag(self, node: yaml.Node, path: Where, tag: str) -> None:
        if node.tag not in (f"{_TAG}{tag}", "!"):
            self._note(
                path,
                f"the tag {node.tag[:60]!r} is not used in recipes. Remove it.",
                node.start_mark.line + 1,
                "unsupported-tag",
            )

    def _replace(self, path: Where, message: str, line: int, code: str) -> None:
        self.document.replaced.add(path)
        self._note(path, message, line, code)

    def _note(self, path: Where, message: str, line: int, code: str) -> None:
        self.document.mistakes.append((path, message, line, code))
