"""What `smelt stages` prints: the table of stages, and one stage with its settings."""

from __future__ import annotations

import inspect
import json
import textwrap
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from smelt.core.errors import InputError, nearest
from smelt.recipe.stage_table import stages

_WIDTH = 79


def list_stages() -> str:
    """Return an entry per stage: its word, what goes in and comes out, what it does."""
    lines = []
    for name, stage in stages().items():
        formats = f"{'/'.join(sorted(stage.accepts))} -> {stage.produces}"
        head = f"{name:14} {formats:17} "
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
            f"no stage '{name}'; there are {', '.join(table)}.{nearest(name, table)}", code="unknown-stage"
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
    for name, info in model.model_fields.items():
        parts = [a for a in (get_args(info.annotation) or (info.annotation,)) if a is not NoneType]
        nested = [a for a in parts if _is_model(a)]
        listed = [a for part in parts if get_origin(part) is tuple for a in get_args(part) if _is_model(a)]
        default = "required" if info.is_required() else f"default {_plain(_default(info))}"
        words = " | ".join(_kind(part) for part in parts if part not in nested)
        head = f"{name}: {_kind(info.annotation)} ({default})"
        if nested:
            head = f"{name}: {words} ({default}), or" if words else f"{name}:"
        text = f"{head} {info.description}" if info.description else head
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "    ", break_on_hyphens=False
        )
        for inner in (*nested, *listed):
            lines += _settings(inner, indent + "  ")
    return lines


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _default(info: FieldInfo) -> Any:
    return info.get_default(call_default_factory=True, validated_data={})


def _plain(value: Any) -> str:
    """Return `value` as a recipe would say it."""
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _kind(annotation: Any) -> str:
    """Return a type in words: `int`, `spread | first | last`, `list of text`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(_plain(value) for value in inner)
    if origin is Annotated:
        return _kind(inner[0])
    if origin in (list, tuple):
        return f"list of {_kind(inner[0])}"
    if origin is dict:
        return f"mapping of {_kind(inner[0])} to {_kind(inner[1])}"
    if inner:
        return " | ".join(_kind(part) for part in inner if part is not NoneType)
    words = {str: "text", bool: "true | false", float: "number", int: "whole number"}
    other = "mapping" if _is_model(annotation) else getattr(annotation, "__name__", str(annotation))
    return words.get(annotation, other)


def _first_line(stage: Any) -> str:
    return (inspect.cleandoc(stage.__doc__ or "").splitlines() or [""])[0].rstrip(".")
