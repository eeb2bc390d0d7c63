"""The list of stages of a recipe: one mapping per step, `name`, `from`, `optional` beside the stage."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from smelt.core.errors import nearest
from smelt.recipe.errors import Mistakes, shown
from smelt.recipe.stage_table import TABLE, unknown_stage
from smelt.recipe.yaml_file import Where

ROOT = "model"
BESIDE = ("name", "from", "optional")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class StageEntry:
    """A step as it was written.

    index: its place in the list. name: None where none was given. settled: whether its settings are some at
    all; what cannot be read stands in `settings` as none.
    """

    index: int
    word: str
    settings: dict[str, Any]
    name: str | None = None
    parent: str | None = None
    optional: bool = False
    line: int = 1
    settled: bool = True

    @property
    def path(self) -> Where:
        """Where its settings stand in the recipe."""
        return ("stages", self.index, self.word)


def read_stages(value: Any, mistakes: Mistakes) -> tuple[list[StageEntry], bool]:
    """Read the list `stages`; note every mistake.

    Returns:
        The steps that could be read, and whether any could not.
    """
    path: Where = ("stages",)
    if value is None:
        mistakes.add(
            path,
            "missing; expected a list of stages (`stages: []` scores the model as it is).",
            code="missing-setting",
        )
        return [], True
    if not isinstance(value, list):
        mistakes.add(path, f"expected a list of stages, read {shown(value)}.", code="wrong-value")
        return [], True
    entries = [read_entry(item, number, mistakes) for number, item in enumerate(value)]
    return [entry for entry in entries if entry is not None], None in entries


def read_entry(item: Any, index: int, mistakes: Mistakes) -> StageEntry | None:
    """Read one step: `- prune: {...}` with its `name`, `from` and `optional`, or the bare word."""
    path: Where = ("stages", index)
    if isinstance(item, str):
        item = {item: None}
    words = [key for key in item if key not in BESIDE] if isinstance(item, dict) else []
    known = [word for word in words if word in TABLE]
    if not words:
        mistakes.add(
            path,
            f"expected a stage such as `prune: {{keep_ratio: 0.5}}`, read {shown(item)}.",
            code="wrong-value",
        )
        return None
    if len(words) > 1 and len(known) == 1:
        for word in words:
            if word not in TABLE:
                hint = nearest(word, BESIDE)
                inside = hint or f" If it is a setting of {known[0]}, indent it more."
                mistakes.add(
                    (*path, word),
                    f"unknown; known beside a stage: {', '.join(BESIDE)}.{inside}",
                    code="unknown-setting",
                )
    elif len(words) > 1:
        mistakes.add(
            path,
            f"expected one stage, read {len(words)}: {', '.join(words)}. Start each with a dash.",
            code="several-stages",
        )
        return None
    word = known[0] if known else words[0]
    if word not in TABLE:
        mistakes.add((*path, word), unknown_stage(word), code="unknown-stage")
        return None
    return _entry(item, word, index, mistakes)


def _entry(item: dict[str, Any], word: str, index: int, mistakes: Mistakes) -> StageEntry:
    path: Where = ("stages", index)
    settings = {} if item[word] is None else item[word]
    settled = isinstance(settings, dict)
    if not settled:
        mistakes.add(
            (*path, word), f"expected a mapping of settings, read {shown(settings)}.", code="wrong-value"
        )
        settings = {}
    parent, optional = item.get("from"), item.get("optional", False)
    if not isinstance(parent, str | None):
        mistakes.add(
            (*path, "from"),
            f"expected the name of an earlier step, read {shown(parent)}.",
            code="wrong-value",
        )
        parent = None
    if not isinstance(optional, bool):
        mistakes.add(
            (*path, "optional"), f"expected true or false, read {shown(optional)}.", code="wrong-value"
        )
        optional = False
    name = _name(item.get("name"), (*path, "name"), mistakes)
    return StageEntry(index, word, settings, name, parent, optional, mistakes.line(path), settled)


def _name(value: Any, path: Where, mistakes: Mistakes) -> str | None:
    # names become folders and are addressed by --set NAME.SETTING, where a key of the recipe comes first
    taken = {ROOT, "task", "data", "stages", "score", "baseline", "gates", "seed", "truncation"}
    taken |= {"threads", "device"}
    if value is None:
        return None
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        mistakes.add(
            path, f"expected a name of letters, digits, - and _, read {shown(value)}.", code="wrong-value"
        )
    elif value in taken:
        mistakes.add(path, f"'{value}' is a word of recipes. Choose another name.", code="reserved-name")
    else:
        return value
    return None


def step_names(entries: list[StageEntry]) -> list[str]:
    """Return the name of each step: its own, or the stage's word with -2, -3, ... where it is taken."""
    taken = {entry.name for entry in entries}
    names: list[str] = []
    for entry in entries:
        name, number = entry.name, 1
        while name is None:
            candidate = entry.word if number == 1 else f"{entry.word}-{number}"
            number += 1
            if candidate not in taken:
                name = candidate
        taken.add(name)
        names.append(name)
    return names
