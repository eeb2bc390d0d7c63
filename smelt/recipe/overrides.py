"""Apply settings from the command line: `--set small.energy=0.9`, `--set score.latency=false`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smelt.core.errors import InputError, did_you_mean
from smelt.recipe.mistakes import Mistakes
from smelt.recipe.stages import STEP_KEYS, StageEntry, read_stage_entry, step_names
from smelt.recipe.yaml_file import KeyPath, YamlDocument, parse_yaml


def apply_overrides(
    value: dict[str, Any], overrides: Sequence[str], mistakes: Mistakes, keys: Sequence[str]
) -> None:
    """Apply each `NAME.SETTING=VALUE` of `overrides` to the recipe `value`, in place.

    NAME is a key of the recipe (`keys`) or the name of a step; VALUE is read as YAML.
    """
    for text in overrides:
        option = f"--set {text}"
        address, sign, written = text.partition("=")
        parts = address.strip().split(".")
        if not sign or not all(parts):
            expected = "expected NAME.SETTING=VALUE, such as seed=3 or prune.keep_ratio=0.5."
            mistakes.add_for_option(expected, code="invalid-override", option=option)
            continue
        try:
            document = parse_yaml(written, option)
        except InputError as error:
            mistakes.add_for_option(str(error), code=error.code, option=option)
            continue
        if document.mistakes:
            for _, message, _, code in document.mistakes:
                mistakes.add_for_option(message, code=code, option=option)
            continue
        path = _resolve_path(value, parts, text, mistakes, keys)
        if path:
            _set_value(value, path, document.value)
            mistakes.overridden[path] = text


def _resolve_path(
    value: dict[str, Any], parts: list[str], text: str, mistakes: Mistakes, keys: Sequence[str]
) -> KeyPath | None:
    """Return the path in the recipe that `parts` addresses; None, with a mistake noted, if there is none."""
    steps = _entries_by_name(value)
    if parts[0] in keys and parts[0] != "stages":
        return tuple(parts)
    if parts[0] not in steps:
        known = [*(key for key in keys if key != "stages"), *steps]
        hint = did_you_mean(parts[0], known)
        problem = f"no key or step '{parts[0]}'. Known: {', '.join(known)}.{hint}"
        mistakes.add_for_option(problem, code="unknown-setting", option=f"--set {text}")
        return None
    entry = steps[parts[0]]
    if len(parts) == 1:
        problem = f"missing the setting of '{parts[0]}'. Write {parts[0]}.SETTING=VALUE."
        mistakes.add_for_option(problem, code="missing-setting", option=f"--set {text}")
        return None
    _expand_bare_stage(value, entry)
    if parts[1] in STEP_KEYS:
        return ("stages", entry.index, *parts[1:])
    return (*entry.path, *parts[1:])


def _entries_by_name(value: dict[str, Any]) -> dict[str, StageEntry]:
    """Return the valid steps by name; `read_stages` reports the mistakes."""
    unheard = Mistakes(YamlDocument("", None))
    stages = value.get("stages")
    items = stages if isinstance(stages, list) else []
    entries = [e for number, item in enumerate(items) if (e := read_stage_entry(item, number, unheard))]
    return dict(zip(step_names(entries), entries, strict=True))


def _expand_bare_stage(value: dict[str, Any], entry: StageEntry) -> None:
    """Turn `- onnx` and `onnx:` (no settings) into `onnx: {}`, so that a setting can be added."""
    item = value["stages"][entry.index]
    if isinstance(item, str):
        item = value["stages"][entry.index] = {}
    if not isinstance(item.get(entry.stage), dict):
        item[entry.stage] = {}


def _set_value(value: dict[str, Any], path: KeyPath, new: Any) -> None:
    """Set the value at `path`; parents that are not mappings become mappings."""
    here: dict[Any, Any] = value
    rest = path
    if path[0] == "stages":
        here, rest = value["stages"][path[1]], path[2:]
    for part in rest[:-1]:
        if not isinstance(here.get(part), dict):
            here[part] = {}  # `score: {latency: false}` and --set score.latency.threads=2
        here = here[part]
    here[rest[-1]] = new
