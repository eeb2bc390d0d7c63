"""Which prefix and languages a run takes: the recipe's, else those that the model brings along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smelt.core.data import SIMILARITY, TEXT_TO_TEXT
from smelt.core.errors import InputError, nearest
from smelt.core.files import load_json
from smelt.core.text import article
from smelt.families.family import Family
from smelt.families.registry import find_family
from smelt.recipe.recipe import Recipe
from smelt.runtime.text.rules import FILE, TextRules, read_text_rules
from smelt.runtime.text.sentence_files import PROMPTS, default_prompt, read_sentence_rules


def text_rules(recipe: Recipe, folder: Path) -> tuple[TextRules, list[str]]:
    """Return the rules for the texts of `recipe` with the model in `folder`, and what the plan says of them.

    What the recipe does not say comes from the model: from its text.json, if smelt made it, else the
    prefix from `task_specific_params` in its config, as T5 checkpoints have them.

    Raises:
        InputError: the recipe says what does not fit the task or the model, or leaves out what it needs.
    """
    data = recipe.data
    if recipe.task not in TEXT_TO_TEXT:
        known = ("prefix", "source_language", "target_language")[recipe.task == SIMILARITY :]
        given = [k for k in known if getattr(data, k) is not None]
        if given:
            raise InputError(
                f"{given[0]}: fits {' and '.join(sorted(TEXT_TO_TEXT))}, not {recipe.task}.",
                code="does-not-fit-task",
                setting=f"data.{given[0]}",
            )
        return _of_vectors(recipe, folder) if recipe.task == SIMILARITY else (TextRules(), [])
    config = _config(folder)
    kind = config.get("model_type")
    family = find_family(config)
    languages = family.languages if family else None
    if family and languages == "codes":
        return _languages(recipe, folder, family)
    if data.prefix is not None:
        return TextRules(prefix=data.prefix), [f"prefix {data.prefix!r} (the recipe's)"]
    if (folder / FILE).is_file():
        rules = read_text_rules(folder)
        return rules, [f"prefix {rules.prefix!r} (the model's {FILE})"]
    if languages == "prefix" and data.target_language:
        prefix = f">>{data.target_language}<< "
        return TextRules(prefix=prefix), [
            f"prefix {prefix!r} ({article(kind)} model's word for the target language)"
        ]
    return _from_params(recipe, config)


def _of_vectors(recipe: Recipe, folder: Path) -> tuple[TextRules, list[str]]:
    """Return what a sentence embedder has done to its texts: a prefix, lower case.

    Raises:
        InputError: sentence-transformers puts a prompt before every text, and the recipe says no prefix.
    """
    known, own = read_text_rules(folder), read_sentence_rules(folder)
    prefix = known.prefix if recipe.data.prefix is None else recipe.data.prefix
    prompt = default_prompt(folder)
    if prompt and recipe.data.prefix is None and not (folder / FILE).is_file():
        raise InputError(
            f"{folder / PROMPTS}: sentence-transformers puts the prompt {prompt!r} before every text of this"
            f' model. Say so with data: {{prefix: {json.dumps(prompt)}}}, or prefix: "" for none.',
            code="missing-prompt",
        )
    rules = TextRules(prefix=prefix, lower=known.lower or (own is not None and own.lower))
    said = [f"prefix {prefix!r}"] if prefix else []
    return rules, said + (["lowercased"] if rules.lower else [])


def _languages(recipe: Recipe, folder: Path, family: Family) -> tuple[TextRules, list[str]]:
    data, known = recipe.data, read_text_rules(folder)
    source = data.source_language or known.source_language
    target = data.target_language or known.target_language
    if source is None or target is None:
        raise InputError(
            f"{article(family.name)} model has to be told its languages, as its tokenizer writes them, for"
            f" instance: data: {{source_language: {family.codes[0]}, target_language: {family.codes[1]}}}.",
            code="missing-languages",
        )
    for code in (source, target):
        _check_code(code, folder)
    prefix = known.prefix if data.prefix is None else data.prefix
    rules = TextRules(prefix=prefix, source_language=source, target_language=target)
    said = [f"languages {source} to {target}"] + ([f"prefix {prefix!r}"] if prefix else [])
    return rules, said


def _check_code(code: str, folder: Path) -> None:
    """Require that the tokenizer knows the language `code`, where its files say what it knows.

    Raises:
        InputError: tokenizer.json has no such token.
    """
    try:
        content = load_json(folder / "tokenizer.json")
        vocabulary = content["model"]["vocab"]  # a unigram model lists its pieces with their scores
        pieces = vocabulary if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary]
        added = [token["content"] for token in content["added_tokens"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # without such a file the tokenizer itself says it, when it is loaded
    if code not in added and code not in pieces:
        raise InputError(
            f"{folder}: the model's tokenizer knows no language {code!r}: tokenizer.json has no such token."
            f"{nearest(code, added)}",
            code="unknown-language",
        )


def _from_params(recipe: Recipe, config: dict[str, Any]) -> tuple[TextRules, list[str]]:
    """Return the prefix that the config names for the task (and the languages)."""
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
                f" (task_specific_params: {known}). Say data: {{prefix: ...}} instead.",
                code="unknown-language",
            )
        fitting = {wanted: fitting[wanted]}
    if len(fitting) == 1:
        [(name, prefix)] = fitting.items()
        return TextRules(prefix=prefix), [f"prefix {prefix!r} (the model's, for {name})"]
    if fitting:
        return TextRules(), [
            f"no prefix; the model's config has one each for {', '.join(fitting)}: choose with"
            " data: {source_language: ..., target_language: ...} or data: {prefix: ...}"
        ]
    return TextRules(), []


def _config(folder: Path) -> dict[str, Any]:
    """Return config.json, or nothing where it cannot be read; other checks say why."""
    try:
        config = load_json(folder / "config.json")
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
