"""What `smelt stages` prints: the stages, and the settings of one from their classes."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin

from smelt.core.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel

_WIDTH = 79


def list_stages() -> str:
    """Return the list of stages: name, input and output formats, summary."""
    from smelt.pipeline.recipe.stages import all_stages

    lines = []
    for name, stage in all_stages().items():
        formats = f"{'/'.join(sorted(stage.accepts))} -> {stage.produces}"
        prefix = f"{name:16} {formats:17} "
        lines += textwrap.wrap(
            prefix + (inspect.cleandoc(stage.__doc__ or "").splitlines() or [""])[0].rstrip("."),
            _WIDTH,
            subsequent_indent=" " * len(prefix),
        )
    return "\n".join([*lines, "", "smelt stages NAME describes a stage and its settings."])


def describe_stage(name: str) -> str:
    """Return the stage's description, its source, and each setting with type and default.

    Raises:
        InputError: there is no such stage.
    """
    from smelt.pipeline.recipe.stages import all_stages

    table = all_stages()
    if name not in table:
        raise InputError(
            f"unknown stage '{name}'. Known stages: {', '.join(table)}.{did_you_mean(name, table)}",
            code="unknown-stage",
        )
    stage = table[name]
    tasks = ", ".join(sorted(stage.tasks))
    needs = ", ".join(sorted(stage.needs | stage.may_need)) or "nothing else"
    may = "may need" if stage.may_need else "needs"
    parts = [
        _fill_paragraphs(f"{name}: {inspect.cleandoc(stage.__doc__ or '')}"),
        textwrap.fill(
            f"input: {', '.join(sorted(stage.accepts))}; output: {stage.produces}; {may} {needs}; tasks:"
            f" {tasks}",
            _WIDTH,
            break_on_hyphens=False,
        ),
        textwrap.fill(f"source: {stage.source}", _WIDTH),
    ]
    if any(info.description is None for info in stage.settings_type.model_fields.values()):
        parts.append(_fill_paragraphs(inspect.cleandoc(stage.settings_type.__doc__ or "")))
    if more := stage.extra_help():
        parts.insert(1, _fill_paragraphs(more))
    return "\n\n".join([*parts, "settings:"]) + "\n" + "\n".join(_settings_lines(stage.settings_type, "  "))


def _fill_paragraphs(text: str) -> str:
    """Wrap the paragraphs of `text`; indented ones are examples and are not changed."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        p if p.startswith(" ") else textwrap.fill(p, _WIDTH, break_on_hyphens=False) for p in paragraphs
    )


def _settings_lines(model: type[BaseModel], indent: str) -> list[str]:
    lines = []
    for setting in settings_of(model):
        default = "required" if setting.required else f"default {setting.default or 'none'}"
        if default == "default none" and "default" in setting.description:
            default = "optional"
        kind = "" if setting.kind == "mapping" else f"{setting.kind} ({default}) "
        text = f"{setting.name}: {kind}{setting.description}".rstrip()
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "    ", break_on_hyphens=False
        )
        for inner in setting.inner:
            lines += _settings_lines(inner, indent + "  ")
    return lines


class Setting(NamedTuple):
    """A setting as written in a recipe.

    default: empty if it is null or a mapping of other settings. inner: the classes of nested settings.
    """

    name: str
    kind: str
    default: str
    required: bool
    description: str
    inner: tuple[type[BaseModel], ...]


def settings_of(model: type[BaseModel]) -> Iterator[Setting]:
    """Yield the settings of a class in order."""
    from pydantic import BaseModel

    for name, info in model.model_fields.items():
        required = info.is_required()
        default = None if required else info.get_default(call_default_factory=True, validated_data={})
        plain = "" if default is None or isinstance(default, BaseModel) else _recipe_text(default)
        inner = tuple(dict.fromkeys(_models(info.annotation)))
        yield Setting(name, _type_text(info.annotation), plain, required, info.description or "", inner)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes of settings in a type."""
    if _is_settings_class(annotation):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _is_settings_class(kind: Any) -> bool:
    from pydantic import BaseModel

    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _recipe_text(value: Any) -> str:
    """Return `value` as written in a recipe."""
    return value if isinstance(value, str) else json.dumps(value)


def _type_text(annotation: Any) -> str:
    """Return the name of a type: `integer`, `uniform | first | last`, `list of string`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(_recipe_text, inner))
    if origin is Annotated:
        return _type_text(inner[0])
    if origin in (list, tuple):
        return f"list of {_type_text(inner[0])}"
    if origin is dict or _is_settings_class(annotation):
        return "mapping"
    if inner:
        kinds = dict.fromkeys(_type_text(member) for member in inner if member is not NoneType)
        return " | ".join(sorted(kinds, key="mapping".__eq__))
    scalar_names = {str: "string", bool: "boolean", float: "number", int: "integer"}
    return scalar_names.get(annotation, getattr(annotation, "__name__", str(annotation)))
