"""Read the key `stages` of a recipe: one mapping per step, with `name`, `from` and `optional`.

Names of stages are mapped to their classes, which are imported on demand. Settings from the command line,
such as `--set small.energy=0.9` and `--set score.latency=false`, are applied to the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from smelt.core.errors import InputError, did_you_mean
from smelt.pipeline.recipe.validation_errors import RecipeErrors, value_text
from smelt.pipeline.recipe.yaml_file import KeyPath, YamlDocument, parse_yaml
from smelt.stage import Stage

STAGE_CLASSES: dict[str, str] = {
    "finetune": "smelt.compress.finetune:Finetune",
    "distill": "smelt.compress.distill.stage:Distill",
    "trim-vocabulary": "smelt.compress.trim_vocabulary.stage:TrimVocabulary",
    "drop-layers": "smelt.compress.drop_layers.stage:DropLayers",
    "drop-experts": "smelt.compress.drop_experts:DropExperts",
    "prune": "smelt.compress.prune.stage:Prune",
    "sparsify": "smelt.compress.sparsify.stage:Sparsify",
    "factorize": "smelt.compress.factorize.stage:Factorize",
    "share-weights": "smelt.compress.share_weights:ShareWeights",
    "shortlist": "smelt.compress.shortlist:ShortlistStage",
    "rotate": "smelt.compress.rotate.stage:Rotate",
    "quantize": "smelt.compress.quantize.stage:Quantize",
    "onnx": "smelt.export.onnx_stage:Onnx",
    "simplify": "smelt.export.onnx_models.simplify:Simplify",
    "quantize-onnx": "smelt.export.onnx_models.quantize_onnx:QuantizeOnnx",
    "fp16": "smelt.export.onnx_models.fp16:Fp16",
    "tensorrt": "smelt.export.tensorrt.stage:TensorrtStage",
}
# Stages that have another class in recipes that start from an ONNX file.
ONNX_EQUIVALENTS = {"quantize": "quantize-onnx"}


def load_stage(stage_name: str) -> type[Stage[Any]]:
    """Return the class of the stage `stage_name`.

    Raises:
        InputError: no such stage; the message suggests the closest name.
    """
    if stage_name not in STAGE_CLASSES:
        raise InputError(unknown_stage_text(stage_name), code="unknown-stage")
    module, _, name = STAGE_CLASSES[stage_name].partition(":")
    stage: type[Stage[Any]] = getattr(import_module(module), name)
    return stage


def all_stages() -> dict[str, type[Stage[Any]]]:
    """Return every stage class by name, in the usual order of use."""
    return {name: load_stage(name) for name in STAGE_CLASSES}


def training_stages() -> list[str]:
    """Return the stages that can train a model with random weights."""
    return [name for name, stage in all_stages().items() if stage.trains_weights]


def unknown_stage_text(name: str) -> str:
    """Return the message that `name` is not a stage."""
    hint = did_you_mean(name, STAGE_CLASSES)
    return f"unknown stage '{name[:60]}'. Known stages: {', '.join(STAGE_CLASSES)}.{hint}"


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


def read_stages(value: Any, errors: RecipeErrors) -> tuple[list[StageEntry], bool]:
    """Read the list `stages` and add every error to `errors`.

    Returns:
        The valid steps, and whether any step is invalid.
    """
    path: KeyPath = ("stages",)
    if value is None:
        errors.add(
            path,
            "missing. Expected a list of stages (`stages: []` scores the unchanged model).",
            code="missing-setting",
        )
        return [], True
    if not isinstance(value, list):
        errors.add(path, f"expected a list of stages, got {value_text(value)}.", code="wrong-value")
        return [], True
    entries = [read_stage_entry(item, number, errors) for number, item in enumerate(value)]
    return [entry for entry in entries if entry is not None], None in entries


def read_stage_entry(item: Any, index: int, errors: RecipeErrors) -> StageEntry | None:
    """Read one step: `- prune: {...}` with `name`, `from` and `optional`, or only the stage's name."""
    path: KeyPath = ("stages", index)
    if isinstance(item, str):
        item = {item: None}
    stage_keys = [key for key in item if key not in STEP_KEYS] if isinstance(item, dict) else []
    stage_names = [stage_key for stage_key in stage_keys if stage_key in STAGE_CLASSES]
    if not stage_keys:
        errors.add(
            path,
            f"expected a stage such as `prune: {{keep_ratio: 0.5}}`, got {value_text(item)}.",
            code="wrong-value",
        )
        return None
    if len(stage_keys) > 1 and len(stage_names) == 1:
        for stage_key in stage_keys:
            if stage_key not in STAGE_CLASSES:
                hint = did_you_mean(stage_key, STEP_KEYS)
                placement_hint = hint or f" If it is a setting of {stage_names[0]}, indent it more."
                errors.add(
                    (*path, stage_key),
                    f"unknown key. Known next to a stage: {', '.join(STEP_KEYS)}.{placement_hint}",
                    code="unknown-setting",
                )
    elif len(stage_keys) > 1:
        errors.add(
            path,
            f"expected one stage, got {len(stage_keys)}: {', '.join(stage_keys)}. Start each with a dash.",
            code="several-stages",
        )
        return None
    stage_key = stage_names[0] if stage_names else stage_keys[0]
    if stage_key not in STAGE_CLASSES:
        errors.add((*path, stage_key), unknown_stage_text(stage_key), code="unknown-stage")
        return None
    return _build_entry(item, stage_key, index, errors)


def _build_entry(item: dict[str, Any], stage: str, index: int, errors: RecipeErrors) -> StageEntry:
    path: KeyPath = ("stages", index)
    settings = {} if item[stage] is None else item[stage]
    is_mapping = isinstance(settings, dict)
    if not is_mapping:
        errors.add(
            (*path, stage),
            f"expected a mapping of settings, got {value_text(settings)}.",
            code="wrong-value",
        )
        settings = {}
    parent, optional = item.get("from"), item.get("optional", False)
    if not isinstance(parent, str | None):
        errors.add(
            (*path, "from"),
            f"expected the name of an earlier step, got {value_text(parent)}.",
            code="wrong-value",
        )
        parent = None
    if not isinstance(optional, bool):
        errors.add(
            (*path, "optional"), f"expected true or false, got {value_text(optional)}.", code="wrong-value"
        )
        optional = False
    name = _checked_name(item.get("name"), (*path, "name"), errors)
    return StageEntry(index, stage, settings, name, parent, optional, errors.line_of(path), is_mapping)


def _checked_name(value: Any, path: KeyPath, errors: RecipeErrors) -> str | None:
    # Names become folders, and --set NAME.SETTING looks up keys of the recipe first.
    reserved_names = {
        MODEL_STEP,
        "task",
        "data",
        "stages",
        "score",
        "baseline",
        "gates",
        "seed",
        "truncation",
    }
    reserved_names |= {"threads", "device"}
    if value is None:
        return None
    if not isinstance(value, str) or not _STEP_NAME.fullmatch(value):
        errors.add(
            path,
            f"expected a name of letters, digits, - and _, got {value_text(value)}.",
            code="wrong-value",
        )
    elif value in reserved_names:
        errors.add(path, f"'{value}' is a reserved word. Choose another name.", code="reserved-name")
    else:
        return value
    return None


def step_names(entries: list[StageEntry]) -> list[str]:
    """Return the name of each step: its `name`, or the stage's name with -2, -3, ... if it is taken."""
    used_names = {entry.name for entry in entries}
    names: list[str] = []
    for entry in entries:
        name, number = entry.name, 1
        while name is None:
            candidate = entry.stage if number == 1 else f"{entry.stage}-{number}"
            number += 1
            if candidate not in used_names:
                name = candidate
        used_names.add(name)
        names.append(name)
    return names


def apply_overrides(
    value: dict[str, Any], overrides: Sequence[str], errors: RecipeErrors, keys: Sequence[str]
) -> None:
    """Apply each `NAME.SETTING=VALUE` of `overrides` to the recipe `value`, in place.

    NAME is a key of the recipe (`keys`) or the name of a step; VALUE is read as YAML.
    """
    for text in overrides:
        option = f"--set {text}"
        address, sign, value_text = text.partition("=")
        address_keys = address.strip().split(".")
        if not sign or not all(address_keys):
            expected = "expected NAME.SETTING=VALUE, such as seed=3 or prune.keep_ratio=0.5."
            errors.add_for_option(expected, code="invalid-override", option=option)
            continue
        try:
            document = parse_yaml(value_text, option)
        except InputError as error:
            errors.add_for_option(str(error), code=error.code, option=option)
            continue
        if document.errors:
            for _, message, _, code in document.errors:
                errors.add_for_option(message, code=code, option=option)
            continue
        path = _resolve_path(value, address_keys, text, errors, keys)
        if path:
            _set_value(value, path, document.value)
            errors.overridden[path] = text


def _resolve_path(
    value: dict[str, Any], parts: list[str], text: str, errors: RecipeErrors, keys: Sequence[str]
) -> KeyPath | None:
    """Return the path in the recipe that `parts` addresses; None, with an error noted, if there is none."""
    steps = _entries_by_name(value)
    if parts[0] in keys and parts[0] != "stages":
        return tuple(parts)
    if parts[0] not in steps:
        addressable = [*(key for key in keys if key != "stages"), *steps]
        hint = did_you_mean(parts[0], addressable)
        problem = f"no key or step '{parts[0]}'. Known: {', '.join(addressable)}.{hint}"
        errors.add_for_option(problem, code="unknown-setting", option=f"--set {text}")
        return None
    entry = steps[parts[0]]
    if len(parts) == 1:
        problem = f"missing the setting of '{parts[0]}'. Write {parts[0]}.SETTING=VALUE."
        errors.add_for_option(problem, code="missing-setting", option=f"--set {text}")
        return None
    _expand_bare_stage(value, entry)
    if parts[1] in STEP_KEYS:
        return ("stages", entry.index, *parts[1:])
    return (*entry.path, *parts[1:])


def _entries_by_name(value: dict[str, Any]) -> dict[str, StageEntry]:
    """Return the valid steps by name; `read_stages` reports the errors."""
    unheard = RecipeErrors(YamlDocument("", None))
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
    mapping: dict[Any, Any] = value
    remaining_keys = path
    if path[0] == "stages":
        mapping, remaining_keys = value["stages"][path[1]], path[2:]
    for parent_key in remaining_keys[:-1]:
        if not isinstance(mapping.get(parent_key), dict):
            mapping[parent_key] = {}  # `score: {latency: false}` and --set score.latency.threads=2
        mapping = mapping[parent_key]
    mapping[remaining_keys[-1]] = new
