"""Read the key `stages` of a recipe: one mapping per step, with `name`, `from` and `optional`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from smelt.core.errors import did_you_mean
from smelt.recipe.mistakes import Mistakes, value_text
from smelt.recipe.stage_table import STAGE_CLASSES, unknown_stage_text
from smelt.recipe.yaml_file import KeyPath

MODEL_STEP = "model"
STEP_KEYS = ("name", "from", "optional")
_STEP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class StageEntry:
    """A step as written in the recipe.

    index: position in the list. name: None if not given. has_settings: False if the settings are not a
    mapping; `settings` is empty then.
    """

    index: int
    stage: str
    settings: dict[str, Any]
    name: str | None = None
    parent: str | None = None
    optional: bool = False
    line: int = 1
    has_settings: bool = True

    @property
    def path(self) -> KeyPath:
        """Path of the step's settings in the recipe."""
        return ("stages", self.index, self.stage)


def read_stages(value: Any, mistakes: Mistakes) -> tuple[list[StageEntry], bool]:
    """Read the list `stages` and add every mistake to `mistakes`.

    Returns:
        The valid steps, and whether any step is invalid.
    """
    path: KeyPath = ("stages",)
    if value is None:
        mistakes.add(
            path,
            "missing. Expected a list of stages (`stages: []` scores the unchanged model).",
            code="missing-setting",
        )
        return [], True
    if not isinstance(value, list):
        mistakes.add(path, f"expected a list of stages, got {value_text(value)}.", code="wrong-value")
        return [], True
    entries = [read_stage_entry(item, number, mistakes) for number, item in enumerate(value)]
    return [entry for entry in entries if entry is not None], None in entries


def read_stage_entry(item: Any, index: int, mistakes: Mistakes) -> StageEntry | None:
    """Read one step: `- prune: {...}` with `name`, `from` and `optional`, or only the stage's name."""
    path: KeyPath = ("stages", index)
    if isinstance(item, str):
        item = {item: None}
    words = [key for key in item if key not in STEP_KEYS] if isinstance(item, dict) else []
    known = [word for word in words if word in STAGE_CLASSES]
    if not words:
        mistakes.add(
            path,
            f"expected a stage such as `prune: {{keep_ratio: 0.5}}`, got {value_text(item)}.",
            code="wrong-value",
        )
        return None
    if len(words) > 1 and len(known) == 1:
        for word in words:
            if word not in STAGE_CLASSES:
                hint = did_you_mean(word, STEP_KEYS)
                inside = hint or f" If it is a setting of {known[0]}, indent it more."
                mistakes.add(
                    (*path, word),
                    f"unknown key. Known next to a stage: {', '.join(STEP_KEYS)}.{inside}",
                    code="unknown-setting",
                )
    elif len(words) > 1:
        mistakes.add(
            path,
            f"expected one stage, got {len(words)}: {', '.join(words)}. Start each with a dash.",
            code="several-stages",
        )
        return None
    word = known[0] if known else words[0]
    if word not in STAGE_CLASSES:
        mistakes.add((*path, word), unknown_stage_text(word), code="unknown-stage")
        return None
    return _build_entry(item, word, index, mistakes)


def _build_entry(item: dict[str, Any], stage: str, index: int, mistakes: Mistakes) -> StageEntry:
    path: KeyPath = ("stages", index)
    settings = {} if item[stage] is None else item[stage]
    settled = isinstance(settings, dict)
    if not settled:
        mistakes.add(
            (*path, stage),
            f"expected a mapping of settings, got {value_text(settings)}.",
            code="wrong-value",
        )
        settings = {}
    parent, optional = item.get("from"), item.get("optional", False)
    if not isinstance(parent, str | None):
        mistakes.add(
            (*path, "from"),
            f"expected the name of an earlier step, got {value_text(parent)}.",
            code="wrong-value",
        )
        parent = None
    if not isinstance(optional, bool):
        mistakes.add(
            (*path, "optional"), f"expected true or false, got {value_text(optional)}.", code="wrong-value"
        )
        optional = False
    name = _checked_name(item.get("name"), (*path, "name"), mistakes)
    return StageEntry(index, stage, settings, name, parent, optional, mistakes.line_of(path), settled)


def _checked_name(value: Any, path: KeyPath, mistakes: Mistakes) -> str | None:
    # Names become folders, and --set NAME.SETTING looks up keys of the recipe first.
    taken = {MODEL_STEP, "task", "data", "stages", "score", "baseline", "gates", "seed", "truncation"}
    taken |= {"threads", "device"}
    if value is None:
        return None
    if not isinstance(value, str) or not _STEP_NAME.fullmatch(value):
        mistakes.add(
            path,
            f"expected a name of letters, digits, - and _, got {value_text(value)}.",
            code="wrong-value",
        )
    elif value in taken:
        mistakes.add(path, f"'{value}' is a reserved word. Choose another name.", code="reserved-name")
    else:
        return value
    return None


def step_names(entries: list[StageEntry]) -> list[str]:
    """Return the name of each step: its `name`, or the stage's name with -2, -3, ... if it is taken."""
    taken = {entry.name for entry in entries}
    names: list[str] = []
    for entry in entries:
        name, number = entry.name, 1
        while name is None:
            candidate = entry.stage if number == 1 else f"{entry.stage}-{number}"
            number += 1
            if candidate not in taken:
                name = candidate
        taken.add(name)
        names.append(name)
    return names
