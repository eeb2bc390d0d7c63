"""Settings from the command line: `--set small.energy=0.9`, `--set score.latency=false`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smelt.core.errors import InputError, nearest
from smelt.recipe.errors import Mistakes
from smelt.recipe.stages import BESIDE, StageEntry, read_entry, step_names
from smelt.recipe.yaml_file import Document, Where, parse_yaml


def apply_overrides(
    value: dict[str, Any], overrides: Sequence[str], mistakes: Mistakes, keys: Sequence[str]
) -> None:
    """Put each `NAME.SETTING=VALUE` of `overrides` into the recipe `value`, in place.

    NAME is a key of the recipe (`keys`) or the name of a step; VALUE is read as YAML.
    """
    for text in overrides:
        option = f"--set {text}"
        address, sign, written = text.partition("=")
        parts = address.strip().split(".")
        if not sign or not all(parts):
            expected = "expected NAME.SETTING=VALUE, for example seed=3 or prune.keep_ratio=0.5."
            mistakes.say(expected, code="invalid-override", option=option)
            continue
        try:
            document = parse_yaml(written, option)
        except InputError as error:
            mistakes.say(str(error), code=error.code, option=option)
            continue
        if document.mistakes:
            for _, message, _, code in document.mistakes:
                mistakes.say(message, code=code, option=option)
            continue
        path = _path(value, parts, text, mistakes, keys)
        if path:
            _put(value, path, document.value)
            mistakes.overridden[path] = text


def _path(
    value: dict[str, Any], parts: list[str], text: str, mistakes: Mistakes, keys: Sequence[str]
) -> Where | None:
    """Return where in the recipe `parts` points, or None after noting that it points nowhere."""
    steps = _steps(value)
    if parts[0] in keys and parts[0] != "stages":
        return tuple(parts)
    if parts[0] not in steps:
        known = [*(key for key in keys if key != "stages"), *steps]
        hint = nearest(parts[0], known)
        told = f"no key or step '{parts[0]}'. Known: {', '.join(known)}.{hint}"
        mistakes.say(told, code="unknown-setting", option=f"--set {text}")
        return None
    entry = steps[parts[0]]
    if len(parts) == 1:
        told = f"which setting of '{parts[0]}'? Write {parts[0]}.SETTING=VALUE."
        mistakes.say(told, code="missing-setting", option=f"--set {text}")
        return None
    _open(value, entry)
    if parts[1] in BESIDE:
        return ("stages", entry.index, *parts[1:])
    return (*entry.path, *parts[1:])


def _steps(value: dict[str, Any]) -> dict[str, StageEntry]:
    """Return the steps by name, as far as they can be read; their mistakes are noted elsewhere."""
    unheard = Mistakes(Document("", None))
    stages = value.get("stages")
    items = stages if isinstance(stages, list) else []
    entries = [e for number, item in enumerate(items) if (e := read_entry(item, number, unheard))]
    return dict(zip(step_names(entries), entries, strict=True))


def _open(value: dict[str, Any], entry: StageEntry) -> None:
    """Turn `- onnx` and `onnx:` (no settings) into `onnx: {}`, so that there is where to put one."""
    item = value["stages"][entry.index]
    if isinstance(item, str):
        item = value["stages"][entry.index] = {}
    if not isinstance(item.get(entry.word), dict):
        item[entry.word] = {}


def _put(value: dict[str, Any], path: Where, new: Any) -> None:
    """Set what stands at `path`; what is no mapping on the way becomes one."""
    here: dict[Any, Any] = value
    rest = path
    if path[0] == "stages":
        here, rest = value["stages"][path[1]], path[2:]
    for part in rest[:-1]:
        if not isinstance(here.get(part), dict):
            here[part] = {}  # `score: {latency: false}` and --set score.latency.threads=2
        here = here[part]
    here[rest[-1]] = new
