"""Resolve the text prefix and the languages of a run from the recipe or the model's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smelt.core.data import SENTENCE_SIMILARITY, TEXT_TO_TEXT_TASKS
from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import load_json
from smelt.core.text import with_article
from smelt.families.family import Family
from smelt.families.registry import find_family
from smelt.recipe.recipe import ParsedRecipe
from smelt.runtime.text.sentence_files import PROMPTS_FILE, default_prompt, read_sentence_rules
from smelt.runtime.text.text_preprocessing import TEXT_RULES_FILE, TextRules, read_text_rules


def resolve_text_rules(recipe: ParsedRecipe, folder: Path) -> tuple[TextRules, list[str]]:
    """Return the text rules of `recipe` for the model in `folder`, and their description for the plan.

    Values that the recipe does not set come from the model: from its text.json, if smelt made it, else the
    prefix from `task_specific_params` in its config, as in T5 checkpoints.

    Raises:
        InputError: settings do not fit the task or the model, or required ones are missing.
    """
    data = recipe.data
    if recipe.task not in TEXT_TO_TEXT_TASKS:
        known = ("prefix", "source_language", "target_language")[recipe.task == SENTENCE_SIMILARITY :]
        given = [k for k in known if getattr(data, k) is not None]
        if given:
            raise InputError(
                f"{given[0]}: only for {' and '.join(sorted(TEXT_TO_TEXT_TASKS))}; the task is {recipe.task}."
                " Remove it.",
                code="does-not-fit-task",
                setting=f"data.{given[0]}",
            )
        return (
            _embedder_text_rules(recipe, folder) if recipe.task == SENTENCE_SIMILARITY else (TextRules(), [])
        )
    config = _read_config_or_empty(folder)
    kind = config.get("model_type")
    family = find_family(config)
    languages = family.language_selection if family else None
    if family and languages == "codes":
        return _multilingual_text_rules(recipe, folder, family)
    if data.prefix is not None:
        return TextRules(prefix=data.prefix), [f"prefix {data.prefix!r} (from the recipe)"]
    if (folder / TEXT_RULES_FILE).is_file():
        rules = read_text_rules(folder)
        return rules, [f"prefix {rules.prefix!r} (from the model's {TEXT_RULES_FILE})"]
    if languages == "prefix" and data.target_language:
        prefix = f">>{data.target_language}<< "
        return TextRules(prefix=prefix), [
            f"prefix {prefix!r} (target language token of {with_article(kind)} model)"
        ]
    return _task_specific_rules(recipe, config)


def _embedder_text_rules(recipe: ParsedRecipe, folder: Path) -> tuple[TextRules, list[str]]:
    """Return the text rules of a sentence embedder: prefix and lower case.

    Raises:
        InputError: the model has a default prompt in sentence-transformers, and the recipe sets no prefix.
    """
    known, own = read_text_rules(folder), read_sentence_rules(folder)
    prefix = known.prefix if recipe.data.prefix is None else recipe.data.prefix
    prompt = default_prompt(folder)
    if prompt and recipe.data.prefix is None and not (folder / TEXT_RULES_FILE).is_file():
        raise InputError(
            f"{folder / PROMPTS_FILE}: sentence-transformers adds the prompt {prompt!r} to every text of this"
            f' model. Set data: {{prefix: {json.dumps(prompt)}}}, or prefix: "" for none.',
            code="missing-prompt",
        )
    rules = TextRules(prefix=prefix, lower=known.lower or (own is not None and own.lower))
    said = [f"prefix {prefix!r}"] if prefix else []
    return rules, said + (["lowercased"] if rules.lower else [])


def _multilingual_text_rules(
    recipe: ParsedRecipe, folder: Path, family: Family
) -> tuple[TextRules, list[str]]:
    data, known = recipe.data, read_text_rules(folder)
    source = data.source_language or known.source_language
    target = data.target_language or known.target_language
    if source is None or target is None:
        raise InputError(
            f"{with_article(family.name)} model needs a source and a target language, as codes of its"
            f" tokenizer. Set, for example, data: {{source_language: {family.example_languages[0]}, "
            f"target_language: {family.example_languages[1]}}}.",
            code="missing-languages",
        )
    for code in (source, target):
        _check_language_code(code, folder)
    prefix = known.prefix if data.prefix is None else data.prefix
    rules = TextRules(prefix=prefix, source_language=source, target_language=target)
    said = [f"languages {source} to {target}"] + ([f"prefix {prefix!r}"] if prefix else [])
    return rules, said


def _check_language_code(code: str, folder: Path) -> None:
    """Require that tokenizer.json, if there is one, has a token for the language `code`.

    Raises:
        InputError: it has no such token.
    """
    try:
        content = load_json(folder / "tokenizer.json")
        vocabulary = content["model"]["vocab"]  # a unigram model lists its pieces with their scores
        pieces = vocabulary if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary]
        added = [token["content"] for token in content["added_tokens"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # without such a file the tokenizer checks it when it is loaded
    if code not in added and code not in pieces:
        raise InputError(
            f"{folder}: unknown language {code!r}: tokenizer.json has no such token."
            f"{did_you_mean(code, added)}",
            code="unknown-language",
        )


def _task_specific_rules(recipe: ParsedRecipe, config: dict[str, Any]) -> tuple[TextRules, list[str]]:
    """Return the prefix for task and languages from the config's `task_specific_params`."""
    params = config.get("task_specific_params")
    prefixes = {
        name: value["prefix"]
        for name, value in (params.items() if isinstance(params, dict) else ())
        if isinstance(value, dict) and isinstance(value.get("prefix"), str)
    }
    fitting = {name: prefix for name, prefix in prefixes.items() if name.startswith(recipe.task)}
    data = recipe.data
    if data.source_language or data.target_language:
        wanted = f"{recipe.task}_{data.source_language}_to_{data.target_language}"
        if wanted not in fitting:
            known = ", ".join(fitting) or "none"
            raise InputError(
                f"source_language and target_language: the model's config has no prefix for {wanted}"
                f" (task_specific_params: {known}). Set data: {{prefix: ...}} instead.",
                code="unknown-language",
            )
        fitting = {wanted: fitting[wanted]}
    if len(fitting) == 1:
        [(name, prefix)] = fitting.items()
        return TextRules(prefix=prefix), [f"prefix {prefix!r} (from the model, for {name})"]
    if fitting:
        return TextRules(), [
            f"no prefix; the model's config has several, for {', '.join(fitting)}. Set"
            " data: {source_language: ..., target_language: ...} or data: {prefix: ...}"
        ]
    return TextRules(), []


def _read_config_or_empty(folder: Path) -> dict[str, Any]:
    """Return config.json, empty if it cannot be read; other checks report why."""
    try:
        config = load_json(folder / "config.json")
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
