"""Read YAML 1.2 with the line of every key and value, and write it.

ruamel.yaml composes the nodes and resolves their types. Supported are mappings, lists, strings, numbers,
true, false and null; a date is a string. As in YAML 1.2's core schema, `no` and `on` are strings and `1e-4`
is a number (https://yaml.org/spec/1.2.2/#103-core-schema).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from smelt.core.errors import InputError

KeyPath: TypeAlias = tuple[str | int, ...]

MAX_BYTES = 1_000_000
# Aliases repeat a node; a few lines of them can expand to billions of nodes.
MAX_NODES = 20_000
MAX_DEPTH = 40
# JSON readers disagree about integers beyond 64 bits.
MAX_INTEGER = 2**63 - 1

_TAG = "tag:yaml.org,2002:"
# `- distill` without a colon: YAML joins it with the next line into one string
_BARE_ITEM = re.compile(r"\s*- (?P<word>[\w-]+)\s*(#.*)?")
_PREFIXED = re.compile(r"[-+]?0[box]")


@dataclass
class YamlDocument:
    """A YAML document as plain Python values, with line numbers and errors.

    lines: line number (from 1) of each key or list item, by path such as ("stages", 1, "prune").
    errors: (path, message, line, code) of duplicate keys, keys that are not strings, and invalid values.
    replaced_paths: paths of invalid values (not finite, too large) that were replaced by others.
    """

    name: str
    value: Any
    text: str = ""
    lines: dict[KeyPath, int] = field(default_factory=dict)
    errors: list[tuple[KeyPath, str, int, str]] = field(default_factory=list)
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
        node = YAML(typ="safe", pure=True).compose(text)
        if node is not None:
            document.value = _NodeConverter(document).convert(node, (), 0)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise InputError(
            _yaml_message(name, text, error), code="invalid-yaml", file=name, line=line
        ) from error
    except ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise InputError(
            f"{name}:{line}: invalid YAML: the character {chr(int(error.character))!r} is not allowed. Remove"
            " it.",
            code="invalid-yaml",
            file=name,
            line=line,
        ) from error
    except YAMLError as error:
        raise InputError(f"{name}: invalid YAML: {error}", code="invalid-yaml", file=name) from error
    except RecursionError as error:
        raise InputError(
            _too_deep_text(name),
            code="recipe-too-deep",
            file=name,
        ) from error
    except (ValueError, IndexError, OverflowError) as error:
        # the scanner does not catch all of these, for example for \U escapes beyond Unicode
        raise InputError(f"{name}: invalid YAML: {error}", code="invalid-yaml", file=name) from error
    return document


def _too_deep_text(name: str) -> str:
    return f"{name}: not a recipe: nested more than {MAX_DEPTH} levels deep."


def _yaml_message(name: str, text: str, error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    location = f"{name}:{mark.line + 1}" if mark else name
    problem = error.problem or "cannot be parsed"
    if error.context:
        problem = f"{problem} ({error.context})"
    hint = " Indent with spaces, not tabs." if "'\\t'" in problem else ""
    lines = text.splitlines()[: mark.line] if mark else []
    previous_line = next((line for line in reversed(lines) if line.partition("#")[0].strip()), "")
    nested = problem.startswith("mapping values") or "<block mapping start>" in problem
    if nested and (item := _BARE_ITEM.fullmatch(previous_line)):
        hint = (
            f" End the line above with a colon (`- {item['word']}:`) and indent the settings more than the"
            " stage."
        )
    return f"{location}: invalid YAML: {problem}.{hint}"


class _NodeConverter:
    """Converts nodes to plain values and records line numbers."""

    def __init__(self, document: YamlDocument) -> None:
        self.document = document
        self.count = 0

    def convert(self, node: Node, path: KeyPath, depth: int) -> Any:
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
        if isinstance(node, MappingNode):
            if node.tag != f"{_TAG}map":
                self._note_unsupported_tag(node, path)
            return self._mapping(node, path, depth)
        if isinstance(node, SequenceNode):
            if node.tag != f"{_TAG}seq":
                self._note_unsupported_tag(node, path)
            return [self.convert(child, (*path, i), depth + 1) for i, child in enumerate(node.value)]
        assert isinstance(node, ScalarNode)  # the composer creates no other node types
        return self._scalar(node, path)

    def _mapping(self, node: MappingNode, path: KeyPath, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key: Hashable = self._scalar(key_node, path) if isinstance(key_node, ScalarNode) else None
            if path and type(key) is int:  # such as the number of a layer; keys of the recipe are strings
                key = str(key)
            if not isinstance(key, str):
                key_text = repr(key_node.value)[:60] if isinstance(key_node, ScalarNode) else "a structure"
                self._note_error(path, f"a key must be a string, got {key_text}.", line, "wrong-key")
                continue
            if key in out:
                first_line = self.document.lines[(*path, key)]
                text = f"duplicate key, first in line {first_line}. Remove one."
                self._note_error((*path, key), text, line, "duplicate-key")
                continue
            self.document.lines[(*path, key)] = line
            out[key] = self.convert(value_node, (*path, key), depth + 1)
        return out

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        line, text = node.start_mark.line + 1, str(node.value)
        if any("\ud800" <= c <= "\udfff" for c in text):
            self._note_replaced(
                path, "a lone surrogate is not a valid character. Remove it.", line, "lone-surrogate"
            )
            return ""
        kind = str(node.tag).removeprefix(_TAG)
        if kind == "null":
            return None
        if kind == "bool" and text.casefold() in ("true", "false"):
            return text.casefold() == "true"
        if kind in ("int", "float"):
            return self._number(text, kind, path, line)
        if kind not in ("str", "bool", "timestamp", "merge", "value"):
            self._note_unsupported_tag(node, path)
        return text

    def _number(self, text: str, kind: str, path: KeyPath, line: int) -> int | float:
        digits = text.replace("_", "").casefold()
        if digits.lstrip("+-") in (".inf", ".nan"):
            self._note_replaced(path, f"expected a finite number, got {text}.", line, "not-finite")
            return 0.0
        try:
            number = float(digits) if kind == "float" else int(digits, 0 if _PREFIXED.match(digits) else 10)
        except ValueError:  # more digits than Python converts, or a tag before text
            number = math.inf
        if not math.isfinite(number) or (kind == "int" and abs(number) >= MAX_INTEGER):
            self._note_replaced(path, f"not a number, or too large: {text[:40]}.", line, "number-too-large")
            return 0
        return number

    def _note_unsupported_tag(self, node: Node, path: KeyPath) -> None:
        line = node.start_mark.line + 1
        text = f"unsupported YAML tag {str(node.tag)[:60]!r}. Remove it."
        self._note_error(path, text, line, "unsupported-tag")

    def _note_replaced(self, path: KeyPath, message: str, line: int, code: str) -> None:
        self.document.replaced_paths.add(path)
        self._note_error(path, message, line, code)

    def _note_error(self, path: KeyPath, message: str, line: int, code: str) -> None:
        self.document.errors.append((path, message, line, code))


def yaml_scalar(text: str) -> str:
    """Return `text` as a YAML string, quoted only if needed."""
    try:
        is_plain = not any(c in text for c in "{}[],#:\n") and parse_yaml(f"a: {text}", "").value == {
            "a": text
        }
    except InputError:
        is_plain = False
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def dump_yaml(value: Any) -> str:
    """Return `value`, of plain types, as YAML: keys in their order, lists that occur twice in full."""
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.allow_unicode, writer.width = True, 100
    writer.representer.ignore_aliases = lambda *_: True
    stream = StringIO()
    writer.dump(value, stream)
    return stream.getvalue()
