"""What `smelt stages` prints: the table of stages, and one stage with its settings."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel

from smelt.core.errors import InputError, nearest
from smelt.recipe.other_names import called
from smelt.recipe.stage_table import stages

_WIDTH = 79


def list_stages() -> str:
    """Return an entry per stage: its word, what goes in and comes out, what it does."""
    lines = []
    for name, stage in stages().items():
        formats = f"{'/'.join(sorted(stage.accepts))} -> {stage.produces}"
        head = f"{name:16} {formats:17} "
        lines += textwrap.wrap(head + _first_line(stage), _WIDTH, subsequent_indent=" " * len(head))
    return "\n".join([*lines, "", "smelt stages NAME explains a stage and its settings."])


def describe_stage(name: str) -> str:
    """Return the stage's description, its source, and each setting with type and default.

    Raises:
        InputError: there is no such stage.
    """
    table = stages()
    if name not in table:
        raise InputError(
            f"no stage '{name}'; there are {', '.join(table)}.{called(name, table) or nearest(name, table)}",
            code="unknown-stage",
        )
    stage = table[name]
    tasks = ", ".join(sorted(stage.tasks))
    needs = ", ".join(sorted(stage.needs)) or "nothing else"
    may = "may need" if hasattr(stage, "needs_with") else "needs"
    parts = [
        _prose(f"{name}: {inspect.cleandoc(stage.__doc__ or '')}"),
        textwrap.fill(
            f"accepts {', '.join(sorted(stage.accepts))}; gives {stage.produces}; {may} {needs}; for {tasks}",
            _WIDTH,
            break_on_hyphens=False,
        ),
        textwrap.fill(f"source: {stage.source}", _WIDTH),
    ]
    if any(info.description is None for info in stage.settings_type.model_fields.values()):
        parts.append(_prose(inspect.cleandoc(stage.settings_type.__doc__ or "")))
    if hasattr(stage, "more_help"):
        parts.insert(1, _prose(stage.more_help()))
    return "\n\n".join([*parts, "settings:"]) + "\n" + "\n".join(_settings(stage.settings_type, "  "))


def _prose(text: str) -> str:
    """Fill the paragraphs of `text` anew; indented ones are examples and stay as they are."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        p if p.startswith(" ") else textwrap.fill(p, _WIDTH, break_on_hyphens=False) for p in paragraphs
    )


def _settings(model: type[BaseModel], indent: str) -> list[str]:
    lines = []
    for setting in settings_of(model):
        default = "required" if setting.required else f"default {setting.default or 'none'}"
        kind = "" if setting.kind == "mapping" else f"{setting.kind} ({default}) "
        text = f"{setting.name}: {kind}{setting.description}".rstrip()
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "    ", break_on_hyphens=False
        )
        for inner in setting.inner:
            lines += _settings(inner, indent + "  ")
    return lines


class Setting(NamedTuple):
    """A setting as a recipe writes it.

    default: empty if it is null or a mapping of other settings. inner: the classes of the mappings in it.
    """

    name: str
    kind: str
    default: str
    required: bool
    description: str
    inner: tuple[type[BaseModel], ...]


def settings_of(model: type[BaseModel]) -> Iterator[Setting]:
    """Yield the settings of a class in their order."""
    for name, info in model.model_fields.items():
        required = info.is_required()
        default = None if required else info.get_default(call_default_factory=True, validated_data={})
        plain = "" if default is None or isinstance(default, BaseModel) else _plain(default)
        inner = tuple(dict.fromkeys(_models(info.annotation)))
        yield Setting(name, _kind(info.annotation), plain, required, info.description or "", inner)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes of settings in a type."""
    if _is_model(annotation):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _plain(value: Any) -> str:
    """Return `value` as a recipe would write it."""
    return value if isinstance(value, str) else json.dumps(value)


def _kind(annotation: Any) -> str:
    """Return the name of a type: `integer`, `uniform | first | last`, `list of string`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(_plain, inner))
    if origin is Annotated:
        return _kind(inner[0])
    if origin in (list, tuple):
        return f"list of {_kind(inner[0])}"
    if origin is dict or _is_model(annotation):
        return "mapping"
    if inner:
        kinds = dict.fromkeys(_kind(part) for part in inner if part is not NoneType)
        return " | ".join(sorted(kinds, key="mapping".__eq__))
    words = {str: "string", bool: "boolean", float: "number", int: "integer"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _first_line(stage: Any) -> str:
    return (inspect.cleandoc(stage.__doc__ or "").splitlines() or [""])[0].rstrip(".")
