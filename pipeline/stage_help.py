"""What `smelt stages` prints: the table of stages, and one stage with its settings."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

from smelt.core.errors import InputError, nearest
from smelt.stage_table import stages

_WIDTH = 79


def list_stages() -> str:
    """Return an entry per stage: its word, what goes in and comes out, what it does."""
    lines = []
    for name, stage in stages().items():
        formats = f"{'/'.join(sorted(stage.accepts))} -> {stage.produces}"
        head = f"{name:10} {formats:17} "
        lines += textwrap.wrap(head + _first_line(stage), _WIDTH, subsequent_indent=" " * len(head))
    return "\n".join([*lines, "", "smelt stages NAME explains a stage and its settings."])


def describe_stage(name: str) -> str:
    """Return the stage's description, its source, and each setting with type and default.

    Raises:
        InputError: there is no such stage.
    """
    table = stages()
    if name not in table:
        raise InputError(f"no stage '{name}'; there are {', '.join(table)}.{nearest(name, table)}")
    stage = table[name]
    tasks = ", ".join(sorted(stage.tasks))
    needs = ", ".join(sorted(stage.needs)) or "nothing else"
    parts = [
        f"{name}: {inspect.cleandoc(stage.__doc__ or '')}",
        f"accepts {', '.join(sorted(stage.accepts))}; gives {stage.produces}; needs {needs}; for {tasks}",
        textwrap.fill(f"source: {stage.source}", _WIDTH),
        "settings:",
    ]
    return "\n\n".join(parts) + "\n" + "\n".join(_settings(stage.settings_type, "  "))


def _settings(model: Any, indent: str) -> list[str]:
    lines = []
    for name, info in model.model_fields.items():
        kind = str(info.annotation) if not isinstance(info.annotation, type) else info.annotation.__name__
        kind = kind.replace("typing.", "").replace("NoneType", "none")
        default = (
            "required" if info.is_required() else f"default {info.get_default(call_default_factory=True)!r}"
        )
        nested = hasattr(info.annotation, "model_fields")
        head = f"{name}:" if nested else f"{name}: {kind} ({default})"
        text = f"{head} {info.description}" if info.description else head
        lines += textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "    ")
        if nested:
            lines += _settings(info.annotation, indent + "  ")
    return lines


def _first_line(stage: Any) -> str:
    return (inspect.cleandoc(stage.__doc__ or "").splitlines() or [""])[0].rstrip(".")
