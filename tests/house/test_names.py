"""Names are the field's terms: settings in pages and recipes, locals, test names. American spelling."""

import ast
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

SOURCES = ("smelt", "compress", "export", "evaluate", "tests", "tools", "benchmarks", "configs")

# what a function must not call its locals and parameters, with the advised names
BANNED_LOCALS = {
    "found": "what it holds: matches, layers, scores", "at": "index, position",
    "place": "path, location, setting", "kept": "kept_heads, num_kept, is_kept",
    "whole": "full_model, full_output", "word": "token, name, text",
    "own": "what it belongs to: step_texts, model_config", "given": "inputs, options, paths",
    "made": "outputs, artifact", "told": "warnings, messages", "gone": "removed", "bad": "invalid_paths",
    "doubts": "warnings", "fit": "find_grid, dtypes",
}  # fmt: skip
# what no test name contains, with the advised words: a name is condition and result
BANNED_IN_TEST_NAMES = {
    **dict.fromkeys(("say", "says", "said", "tell", "tells", "told"), "reports, warns, contains"),
    **dict.fromkeys(("stay", "stays"), "is kept, is unchanged"),
    **dict.fromkeys(("goes", "gone"), "is removed"),
    **dict.fromkeys(("fed", "asked"), "inputs, requested"),
    **dict.fromkeys(("those", "what", "who", "whose", "whom", "nobody"), "the thing: equal_full_forward"),
    **dict.fromkeys(("beside", "besides", "behind", "anew"), "next_to, with, after, again"),
    **dict.fromkeys(("harm", "harms", "hurts", "damage"), "sensitivity, raises_damaged_file"),
    **dict.fromkeys(("stands", "stood", "lies", "lay"), "is"),
    **dict.fromkeys(("made", "whole", "twin", "astray"), "outputs, full, reference, diverged"),
}
BRITISH = (
    *("behaviour", "colour", "favour", "flavour", "harbour", "honour", "humour", "labour", "neighbour",
        "rumour"),
    *("artefact", "centre", "defence", "fibre", "grey", "isation", "judgement", "learnt", "licence", "litre"),
    *("misspelt", "offence", "theatre", "whilst"),
    *(f"{stem}l{end}" for stem in ("label", "level", "model", "signal", "travel") for end in ("ed", "ing")),
    *(f"{stem}s{end}" for end in ("e", "ing") for stem in (*("analy", "binari", "capitali", "categori",
        "emphasi", "finali", "generali", "initiali", "lineari"), *("locali", "materiali", "maximi", "memori",
        "minimi", "normali", "optimi", "organi", "paralleli"), *("penali", "prioriti", "quanti", "randomi",
        "recogni", "regulari", "seriali", "speciali"), *("standardi", "summari", "synchroni", "tokeni",
        "utili", "vectori", "visuali"))),
)  # fmt: skip


@cache
def texts_of(*suffixes: str) -> dict[Path, str]:
    """The text of every file of the project with one of the suffixes, except this one."""
    folders = [ROOT / name for name in (*SOURCES, "docs")]
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    paths += [path for path in ROOT.iterdir() if path.suffix in suffixes]
    return {
        path: path.read_text(encoding="utf-8") for path in sorted(paths) if path != Path(__file__).resolve()
    }


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str | None]]:
    """The lines and names of parameters, and of what is bound inside of functions."""
    waiting = [(tree, False)]
    while waiting:
        node, is_inside = waiting.pop()
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif is_inside and isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif is_inside and isinstance(node, ast.FunctionDef | ast.ExceptHandler | ast.MatchAs):
            yield node.lineno, node.name
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            is_inside = not isinstance(node, ast.ClassDef)  # attributes of classes are no locals
        waiting += [(child, is_inside) for child in ast.iter_child_nodes(node)]


def test_functions_bind_no_banned_names() -> None:
    names = "|".join(BANNED_LOCALS)
    # parsing every file takes seconds, so only those are parsed that may bind one of the names
    target = re.compile(rf"(?<![\w.])(?:{names})\s*(?:[:=,)\](]|[-+*/|&]=|in\b)|\b(?:as|def) (?:{names})\b")
    assert [
        f"{path.relative_to(ROOT)}:{line}: {name} -> {BANNED_LOCALS[name]}"
        for path, text in texts_of(".py").items()
        if target.search(text)
        for line, name in sorted(set(bound_names(ast.parse(text))))
        if name in BANNED_LOCALS
    ] == []


def test_names_of_validators_begin_with_check_convert_fill_or_mark() -> None:
    validator = re.compile(r"@(?:model|field)_validator\(.*\)\n(?:\s*@classmethod\n)?\s*def (\w+)")
    assert [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts_of(".py").items()
        for name in validator.findall(text)
        if not name.startswith(("_check_", "_convert_", "_fill_", "_mark_"))
    ] == []


def test_test_names_are_condition_and_result() -> None:
    assert [
        f"{path.relative_to(ROOT)}: {name}: {part} -> {BANNED_IN_TEST_NAMES[part]}"
        for path, text in texts_of(".py").items()
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", text, re.MULTILINE)
        for part in name.split("_")
        if part in BANNED_IN_TEST_NAMES
    ] == []


def test_spelling_is_american() -> None:
    assert [
        f"{path.relative_to(ROOT)}: {spelling}"
        for path, text in texts_of(".py", ".md", ".yaml", ".toml", ".jinja").items()
        for lower in [text.lower().replace("aria-labelledby", "")]  # HTML's name
        for spelling in BRITISH
        if spelling in lower
    ] == []


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
    from smelt.pipeline.recipe.validation_errors import OTHER_NAMES

    settings = {name for model in every_model() for name in model.model_fields}
    assert {name for names in OTHER_NAMES.values() for name in names} - settings == set()
