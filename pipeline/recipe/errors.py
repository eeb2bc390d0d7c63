"""The mistakes of a recipe: gathered, given their line, and said in words.

Settings are checked by pydantic; what it finds is translated here into sentences that say what was
expected (from the JSON schema of the settings) and what was read.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic_core import ErrorDetails

from smelt.core.errors import SettingError, SmeltError, nearest, together
from smelt.core.messages import Message
from smelt.recipe.other_names import called
from smelt.recipe.yaml_file import Document, Where

_LAST = 2**31  # behind all lines
ModelT = TypeVar("ModelT", bound=BaseModel)
Schema = Mapping[str, Any]
_OWN_WORDS = ("missing", "extra_forbidden", "value_error", "assertion_error")


class Mistakes:
    """Gathers every mistake of one recipe, to be reported together.

    overridden: where a value came from the command line: its path -> the text of `--set`.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self.overridden: dict[Where, str] = {}
        self._found: list[tuple[int, Message]] = []
        for path, message, line, code in document.mistakes:
            self.add(path, message, line=line, code=code)

    def __len__(self) -> int:
        return len(self._found)

    def add(self, path: Where, message: str, line: int | None = None, *, code: str) -> None:
        """Note that `message` holds for the value at `path` (from there its line is found).

        code: of the kind of mistake, where a stage refuses the same at work; the error has it if all have.
        """
        source = self._override(path)
        if line is None and source is None and path in self.document.replaced:
            return  # what stands there is not what was written, and that was said
        line = line or self.line(path)
        start = f"--set {source}" if source else ""
        text = ": ".join(part for part in (start, dotted(path), message) if part)
        place: dict[str, Any] = {} if source else {"file": self.document.name, "line": line}
        found = Message(code=code, severity="error", message=text, setting=dotted(path) or None, **place)
        if (line, found) not in self._found:
            self._found.append((line, found))

    def note(self, path: Where, found: Message) -> None:
        """Note that `found` holds for the value at `path`."""
        self.add(path, str(found), code=found.code)

    def refuse(self, path: Where, error: SmeltError) -> None:
        """Note what `error` says of the value at `path`; of one that reports several mistakes, each."""
        for found in error.found or (error.as_message(),):
            self.note(path, found)

    def say(self, text: str, code: str, option: str) -> None:
        """Note a mistake that has no place in the file: `option` of the command line is wrong."""
        message = text if text.startswith(option) else f"{option}: {text}"
        found = Message(code=code, severity="error", message=message, setting=option)
        self._found.append((_LAST, found))

    def line(self, path: Where) -> int:
        """Return the line of `path`, or of the nearest part around it that stands in the file."""
        lines = self.document.lines
        return next((lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in lines), 1)

    def raise_all(self) -> None:
        """Report what was found, in the order of the lines.

        Raises:
            InputError: anything was found.
        """
        if self._found:
            raise together(one for _, one in sorted(self._found, key=lambda pair: pair[0]))

    def _override(self, path: Where) -> str | None:
        found = (self.overridden.get(path[:n]) for n in range(len(path), 0, -1))
        return next((text for text in found if text), None)


def dotted(path: Where) -> str:
    """Return ``stages[1].prune.keep_ratio`` for ("stages", 1, "prune", "keep_ratio")."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def shown(value: Any) -> str:
    """Return `value` as a message shows it: texts in quotes, long ones cut."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check(
    model: type[ModelT],
    value: Any,
    path: Where,
    mistakes: Mistakes,
    stand_ins: Mapping[str, Any] | None = None,
) -> tuple[ModelT | None, set[Where]]:
    """Turn `value`, read at `path`, into a `model`; note every mistake.

    Strict: a text is no number, 1 is not true. JSON is what makes pydantic take a list for a tuple.

    Args:
        model: what is expected.
        value: what was read.
        path: where it stands.
        mistakes: gets what is wrong.
        stand_ins: values for keys that must be there.

    Returns:
        The model with defaults (and stand-ins) in place of what is wrong, so that the rest can be checked
        in the same go, or None where there is no such model; and where below `path` it is wrong.
    """
    if not isinstance(value, dict):
        mistakes.add(
            path, f"expected {_mapping_of(model.model_fields)}, read {shown(value)}.", code="wrong-value"
        )
        return None, {()}
    bad, given = set[Where](), value
    while True:
        try:
            return model.model_validate_json(json.dumps(given), strict=True), bad
        except ValidationError as error:
            found = list(_translated(error, given, _schema_of(model)))
        for where, message, code in () if bad else found:
            mistakes.add((*path, *where), message, code=code)
        places = {_removable(given, where) for where, _, _ in found}
        if places <= bad or () in places:
            return None, bad | {()}
        bad |= {where for where, _, _ in found} | places
        given = _without(given, places, stand_ins or {})


def _removable(value: Any, where: Where) -> Where:
    """Return the part around `where` that can be left out: what stands there, or misses something there."""
    for number, step in enumerate(where):
        if isinstance(step, int) or not isinstance(value, dict):
            return where[:number]  # a list is left out as a whole
        if step not in value:
            return where[: number + 1] if number == 0 else where[:number]
        value = value[step]
    return where


def _without(value: dict[str, Any], places: set[Where], stand_ins: Mapping[str, Any]) -> dict[str, Any]:
    """Return `value` without what stands at `places`; a key that has a stand-in gets it."""
    out = dict(value)
    for key, below in {place[0]: {p[1:] for p in places if p[0] == place[0]} for place in places}.items():
        name = str(key)
        if () not in below and isinstance(out.get(name), dict):
            out[name] = _without(out[name], below, {})
        elif name in stand_ins:
            out[name] = stand_ins[name]
        else:
            out.pop(name, None)
    return out


def touches(bad: Collection[str], *paths: str) -> bool:
    """Say whether one of `paths` (dotted), something around it or in it is known to be wrong."""
    return any(
        one == two or one.startswith((f"{two}.", f"{two}[")) or two.startswith(f"{one}.")
        for one in bad
        for two in paths
    )


def _translated(
    error: ValidationError, value: Any, schema: Schema | None
) -> Iterator[tuple[Where, str, str]]:
    # a union yields one error per member, all about the same value: the schema names them together
    seen: set[tuple[Where, str]] = set()
    found = [(*_place(detail, value), detail) for detail in error.errors(include_url=False)]
    places = {where for where, _, _ in found}
    empty = {where for where, _, detail in found if detail["type"] == "string_too_short"}
    for where, read, detail in found:
        # where one member of a union fits but for something inside, what the others say is noise
        if detail["type"] not in _OWN_WORDS and any(p[: len(where)] == where != p for p in places):
            continue
        part = _part(schema, where) if schema else None
        kind = detail["type"]
        if where in empty and kind != "string_too_short":
            continue
        if kind == "extra_forbidden":
            known = _known(_part(schema, where[:-1]) if schema else None, schema)
            word = str(where[-1])
            code = "unknown-setting"
            message = f"unknown. Known: {', '.join(known) or 'none'}.{nearest(word, known)}"
            if renamed := called(word, known):
                message = f"unknown.{renamed}"
        elif kind == "missing":
            wanted = _expectation(part, schema) if part else ""
            code = "missing-setting"
            message = f"missing; expected {wanted}." if wanted else "missing."
        elif kind == "string_too_short":
            code = "empty-text"
            message = f"expected a text that is not empty, read {shown(read)}."
        elif kind in ("value_error", "assertion_error"):
            refused = detail["ctx"]["error"]
            code = refused.code if isinstance(refused, SettingError) else "wrong-setting"
            message = f"{str(refused).rstrip('.')}."
        else:
            expected = _expectation(part, schema) if part else ""
            expected = expected or detail["msg"].removeprefix("Input should be ")
            words = [w for w in _words(part, schema) if isinstance(w, str)]
            hint = (called(read, words) or nearest(read, words)) if isinstance(read, str) else ""
            code = "wrong-value"
            message = f"expected {expected}, read {shown(read)}.{hint}"
        if (where, message) not in seen:
            seen.add((where, message))
            yield where, message, code


def _place(detail: ErrorDetails, value: Any) -> tuple[Where, Any]:
    """Return the path of an error and the value there, without the names that pydantic gives to unions."""
    path: list[str | int] = []
    last = len(detail["loc"]) - 1
    for number, part in enumerate(detail["loc"]):
        inside = (isinstance(value, dict) and part in value) or (
            isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value)
        )
        if inside:
            value = value[part]
        if inside or (number == last and detail["type"] == "missing"):
            path.append(part)
    return tuple(path), value


@functools.lru_cache(maxsize=256)  # making one takes longer than all other checks of a recipe
def _schema_of(model: type[BaseModel]) -> Schema | None:
    try:
        return TypeAdapter(model).json_schema()
    except PydanticInvalidForJsonSchema:
        return None


def _resolve(part: Schema, root: Schema | None) -> Schema:
    while "$ref" in part and root is not None:
        part = root["$defs"][str(part["$ref"]).rsplit("/", 1)[-1]]
    return part


def _branches(part: Schema | None, root: Schema | None) -> list[Schema]:
    """Return the members of a union (`None` left out), or `part` alone."""
    if part is None:
        return []
    part = _resolve(part, root)
    union = part.get("anyOf") or part.get("oneOf")
    if not union:
        return [part]
    return [b for member in union for b in _branches(member, root) if b.get("type") != "null"]


def _part(root: Schema, path: Where) -> Schema | None:
    """Return the schema of what stands at `path`, or None where it is not known."""
    part: Schema = root
    for step in path:
        for branch in _branches(part, root):
            fixed = branch.get("prefixItems", [])
            if isinstance(step, int):
                found = fixed[step] if step < len(fixed) else branch.get("items")
            else:
                found = branch.get("properties", {}).get(step, branch.get("additionalProperties"))
            if isinstance(found, Mapping):
                part = found
                break
        else:
            return None
    return part


def _known(part: Schema | None, root: Schema | None) -> list[str]:
    return [name for branch in _branches(part, root) for name in branch.get("properties", {})]


def _words(part: Schema | None, root: Schema | None) -> list[Any]:
    out: list[Any] = []
    for branch in _branches(part, root):
        out += branch.get("enum", []) + ([branch["const"]] if "const" in branch else [])
    return out


def _expectation(part: Schema | None, root: Schema | None) -> str:
    return " or ".join(dict.fromkeys(filter(None, (_phrase(b, root) for b in _branches(part, root)))))


def _phrase(part: Schema, root: Schema | None) -> str:
    if "const" in part:
        return shown(part["const"])
    if "enum" in part:
        return f"one of {', '.join(shown(v) for v in part['enum'])}"
    kind = part.get("type")
    if kind in ("integer", "number"):
        return f"a {'whole number' if kind == 'integer' else 'number'}{_bounds(part)}"
    if kind == "array":
        inner = _expectation(part.get("items"), root)
        least = f" of at least {part['minItems']}" if part.get("minItems") else ""
        return f"a list{least}{f' (each {inner})' if inner else ''}"
    if kind == "object":
        return _mapping_of(part.get("properties", {}))
    return {"string": "a text", "boolean": "true or false"}.get(str(kind), "")


def _bounds(part: Schema) -> str:
    low, high = part.get("minimum"), part.get("maximum")
    above, below = part.get("exclusiveMinimum"), part.get("exclusiveMaximum")
    floor, ceiling = low if low is not None else above, high if high is not None else below
    if floor is not None and ceiling is not None:
        edges = [f"{edge:.10g} excluded" for edge in (above, below) if edge is not None]
        return f" between {floor:.10g} and {ceiling:.10g}" + (f" ({', '.join(edges)})" if edges else "")
    if floor is not None:
        return f" above {floor:.10g}" if low is None else f" of at least {floor:.10g}"
    if ceiling is not None:
        return f" below {ceiling:.10g}" if high is None else f" of at most {ceiling:.10g}"
    return ""


def _mapping_of(names: Mapping[str, Any]) -> str:
    return f"a mapping with {', '.join(names)}" if names else "a mapping"
