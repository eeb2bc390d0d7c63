"""Names are those of the field: pages and recipes use the current ones, and earlier ones are hints alone."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

ROOT = Path(__file__).resolve().parents[2]
TEXTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "configs/**/*.yaml", "benchmarks/**/*.yaml", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)


@cache
def stage_settings() -> dict[str, type[BaseModel]]:
    from smelt.pipeline.recipe.stages import all_stages

    return {name: stage.settings_type for name, stage in all_stages().items()}


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The settings classes inside of a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def values_in(annotation: Any) -> Iterator[Any]:
    """The values of all literals inside of a type."""
    for argument in get_args(annotation):
        if get_origin(annotation) is not None and not isinstance(argument, type) and get_args(argument) == ():
            yield argument
        yield from values_in(argument)


def every_model() -> set[type[BaseModel]]:
    from smelt.pipeline.recipe.recipe import RecipeKeys

    models: set[type[BaseModel]] = set()
    waiting: list[type[BaseModel]] = [RecipeKeys, *stage_settings().values()]
    while waiting:
        model = waiting.pop()
        if model not in models:
            models.add(model)
            waiting += [
                nested for info in model.model_fields.values() for nested in models_in(info.annotation)
            ]
    return models


def mappings(text: str) -> Iterator[tuple[str, Any]]:
    """Each `stage: {...}` in a text whose braces hold YAML."""
    for match in re.finditer(r"(?<![\w.-])([a-z][a-z0-9-]*): \{", text):
        if match.group(1) not in stage_settings():
            continue
        depth = 0
        for end in range(match.end() - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                break
        body = text[match.end() - 1 : end + 1]
        if "..." in body or body != body.strip():
            continue
        try:
            yield match.group(1), YAML(typ="safe").load(body)
        except YAMLError:
            continue


def unknown(settings: Any, models: list[type[BaseModel]]) -> Iterator[str]:
    """Keys in `settings` that no model of `models` has; nested ones too."""
    if isinstance(settings, list):
        for item in settings:
            yield from unknown(item, models)
    if not isinstance(settings, dict) or not models or set(settings) == {"search"}:
        return
    for key, value in settings.items():
        fields = [model.model_fields[key] for model in models if key in model.model_fields]
        if not fields and all(isinstance(k, str) for k in settings):
            yield str(key)
        yield from unknown(value, [item for info in fields for item in models_in(info.annotation)])


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_settings_in_pages_and_recipes_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    # inside of a training `sparsify` is its own, smaller set of settings
    inner = [info.annotation for info in stage_settings()["finetune"].model_fields.values()]
    nested = [model for annotation in inner for model in models_in(annotation)]
    wrong_keys = []
    for stage_name, settings in mappings(text):
        models = [stage_settings()[stage_name], *(nested if stage_name == "sparsify" else [])]
        if stage_name == "quantize":  # on a graph
            models.append(stage_settings()["quantize-onnx"])
        wrong_keys += [f"{stage_name}: {key}" for key in unknown(settings, models)]
    assert wrong_keys == []


def test_name_hints_refer_to_existing_names() -> None:
    from smelt.cli.main import main
    from smelt.data.tasks import ALL_TASKS
    from smelt.pipeline.recipe.validation_errors import OTHER_NAMES

    options = {
        option for command in main.commands.values() for param in command.params for option in param.opts
    }
    infos = [(name, info) for model in every_model() for name, info in model.model_fields.items()]
    known_names = {*stage_settings(), *ALL_TASKS, *options, *(name for name, _ in infos)}
    known_names |= {value for _, info in infos for value in values_in(info.annotation)}
    assert {name for names in OTHER_NAMES.values() for name in names} - known_names == set()


def test_former_name_suggests_current_name() -> None:
    from smelt.pipeline.recipe.validation_errors import other_name_hint, own_name

    settings = stage_settings()
    for stage, former_name, name in (
        ("prune", "keep", "keep_ratio"),
        ("prune", "what", "targets"),
        ("fp16", "keep", "keep_fp32"),
        ("quantize", "rows", "calibration_samples"),
        ("distill", "rows", "train_on"),
        ("shortlist", "rows", "max_train_samples"),
        ("quantize", "budget", "max_excluded"),
        ("factorize", "budget", "parameter_budget"),
        ("onnx", "loop", "generation_graph"),
    ):
        assert former_name not in settings[stage].model_fields
        assert own_name(former_name, settings[stage].model_fields) == name
    assert other_name_hint("depth", settings) == " 'depth' is called 'drop-layers'."
    assert own_name("keep_ratio", settings["prune"].model_fields) is None
