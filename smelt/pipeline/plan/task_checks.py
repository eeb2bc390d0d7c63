"""Resolve a sentence embedder's pooling and metrics, prefix, languages and prompt template, before a run.

Pooling and normalization come from the model's folder, in the layout of sentence-transformers; the recipe's
key `embedding` overrides them. The metrics depend on whether the test samples have scores. Prefix and
languages come from the recipe or the model's files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, combined_error, did_you_mean
from smelt.core.files import load_json
from smelt.core.messages import Message, error_message, warning, with_article
from smelt.data.prompt_rows import assistant_turns
from smelt.data.splits import Split
from smelt.data.tasks import task_names
from smelt.evaluate.metrics.registry import AGREEMENT_METRIC, CORRELATION_METRICS, EMBEDDING_METRICS
from smelt.models.families.family import Family
from smelt.models.families.registry import find_family
from smelt.models.prompt_template import (
    CHAT,
    PROMPT_FIELD,
    PromptTemplate,
    open_prompt_template,
    read_chat_template,
)
from smelt.models.text_rules import (
    MODULES_FILE,
    POOLINGS,
    PROMPTS_FILE,
    TEXT_RULES_FILE,
    SentenceRules,
    TextRules,
    default_prompt,
    read_sentence_rules,
    read_text_rules,
)
from smelt.pipeline.recipe.recipe import ParsedRecipe
from smelt.pipeline.recipe.validation_errors import Finding


def _tokenizer_folder(recipe: ParsedRecipe, folder: Path) -> Path | None:
    """Return the folder of the tokenizer; None for one that is trained by the run."""
    if isinstance(recipe.model, str):
        return folder
    tokenizer = recipe.model.tokenizer
    return recipe.base / tokenizer if isinstance(tokenizer, str) else None


def prompt_rules(recipe: ParsedRecipe, folder: Path) -> tuple[TextRules, list[str]]:
    """Return the prompt template and its description for the plan.

    It is the recipe's, else the one stored with the model, else the tokenizer's chat template, else
    `{prompt}`.

    Raises:
        InputError: `no-chat-template`, `missing-placeholder`, or the files are damaged.
    """
    template, origin = recipe.data.prompt_template, "from the recipe"
    source = _tokenizer_folder(recipe, folder)
    if template is None:
        template, origin = read_text_rules(folder).prompt_template, f"from the model's {TEXT_RULES_FILE}"
    is_local = source is None or source.is_dir()
    if template is None and not is_local:
        raise InputError(
            f"model.tokenizer: {source} is not a local folder, so whether it has a chat template is not known"
            " yet. Set data: {prompt_template: chat}, or to a text with {prompt}.",
            code="missing-setting",
            setting="data.prompt_template",
        )
    if template is None:
        chat = None if source is None else read_chat_template(source)
        template = PROMPT_FIELD if chat is None else CHAT
        origin = "the model has no chat template" if chat is None else "the tokenizer's chat template"
    if template != CHAT and PROMPT_FIELD not in template:
        raise InputError(
            f"prompt_template: {template[:80]!r} has no {PROMPT_FIELD}, which is replaced by each prompt."
            ' Write, for example, "Question: {prompt}\\nAnswer:", or chat.',
            code="missing-placeholder",
            setting="data.prompt_template",
        )
    if template == CHAT and is_local:
        open_prompt_template(source or folder, template, {})  # raises where the tokenizer has none
    return TextRules(prompt_template=template), [f"prompt template {template!r} ({origin})"]


def prompt_errors(recipe: ParsedRecipe, folder: Path, splits: Mapping[str, Split]) -> list[Finding]:
    """Return errors for prompts that do not fit the prompt template, at most one for each split.

    Instructions and conversations need the format that the model was trained with, so they are never passed
    as plain text to a model without a chat template unless the recipe sets the template. One conversation
    of each order of roles is rendered, since templates refuse some orders.
    """
    if recipe.traits.samples != "prompts":
        return []
    rules, _ = prompt_rules(recipe, folder)
    tokenizer_folder = _tokenizer_folder(recipe, folder) or folder
    if not tokenizer_folder.is_dir():  # a tokenizer of the hub
        return []
    recorded = recipe.data.prompt_template or read_text_rules(folder).prompt_template
    assert rules.prompt_template is not None
    template = open_prompt_template(tokenizer_folder, rules.prompt_template, {})
    errors: list[Finding] = []
    for name, split in splits.items():
        try:
            if not recorded and not template.is_chat:
                _require_plain_prompts(split)
            _render_examples(template, split)
        except InputError as error:
            errors.append((("data", name), error.as_message()))
    return errors


def _require_plain_prompts(split: Split) -> None:
    example = next((e for e in split.examples if e.layout in ("instruction", "messages")), None)
    if example is not None:
        raise InputError(
            f"{split.origin}: the samples are {_LAYOUT_TEXTS[example.layout or 'prompt']}, and the model's"
            " tokenizer has no chat template that turns them into its input. Set data: {prompt_template: ...}"
            ' to the text around each prompt in training, for example "{prompt}\\n\\n".',
            code="no-chat-template",
            setting="data.prompt_template",
        )


_LAYOUT_TEXTS = {"instruction": "instructions", "messages": "conversations", "prompt": "prompts"}


def _render_examples(template: PromptTemplate, split: Split) -> None:
    """Render one conversation of each order of roles.

    Raises:
        InputError: the template refuses it; the message has its line.
    """
    rendered_roles: set[tuple[str, ...]] = set()
    for position, example in enumerate(split.examples, 1):
        try:
            turn = assistant_turns(example.text, (*example.references, "-")[0])[-1]
            roles = tuple(message["role"] for message in turn)
            if roles not in rendered_roles:
                rendered_roles.add(roles)
                template.render_response(turn)
        except InputError as error:
            number = example.line or example.row or position
            raise error.with_location(f"{split.origin}:{number}") from error


_POOLING_TEXTS = {
    "mean": "mean over the tokens",
    "cls": "the first token",
    "max": "maximum over the tokens",
}


def resolve_pooling(recipe: ParsedRecipe, folder: Path | None) -> tuple[SentenceRules, list[Message]]:
    """Return the pooling rules for the model in `folder`, and warnings about them.

    folder: None for a model that is created from its config.

    Raises:
        InputError: the folder's files are damaged, or use a feature that smelt does not support.
    """
    model_rules = None if folder is None else read_sentence_rules(folder)
    explicit = recipe.embedding.model_dump(exclude_none=True)
    rules = (model_rules or SentenceRules()).model_copy(update=explicit)
    warnings: list[Message] = []
    if model_rules is None and "pooling" not in explicit:
        warnings.append(
            warning(
                "pooling-assumed",
                f"The model has no {MODULES_FILE}, which defines its pooling. Using:"
                f" {_POOLING_TEXTS[rules.pooling]}."
                f" Set embedding: {{pooling: ...}} to one of {', '.join(POOLINGS)}.",
                setting="embedding.pooling",
            )
        )
    for name in ("pooling", "normalize") if model_rules is not None else ():
        if name in explicit and explicit[name] != getattr(model_rules, name):
            warnings.append(
                warning(
                    "embedding-differs",
                    f"embedding: {name} is {explicit[name]}, but the model was trained with"
                    f" {getattr(model_rules, name)} ({MODULES_FILE}), so its vectors will differ."
                    " Remove the setting to use the model's value.",
                    setting=f"embedding.{name}",
                )
            )
    return rules, warnings


def pooling_text(rules: SentenceRules) -> str:
    """Return the description of `rules` in `smelt plan`."""
    length = "" if rules.max_length is None else f", texts of at most {rules.max_length:,} tokens"
    return (
        f"{_POOLING_TEXTS[rules.pooling]}{', normalized' if rules.normalize else ', not normalized'}{length}"
    )


def embedder_metrics(recipe: ParsedRecipe, data: Mapping[str, Split]) -> tuple[str, ...]:
    """Return the metrics of a run on `data`.

    Raises:
        InputError: metrics or gates need scores that the test samples do not have; lists every error.
    """
    errors = [
        error.with_prefix(f"{'.'.join(map(str, path))}: ") for path, error in embedder_errors(recipe, data)
    ]
    if errors:
        raise combined_error(errors)
    return metrics_of_samples(recipe, data["test"])


def metrics_of_samples(recipe: ParsedRecipe, test: Split) -> tuple[str, ...]:
    """Return the recipe's metrics, or those that fit the samples of an embedder."""
    default_metrics = EMBEDDING_METRICS if test.has_labels else (AGREEMENT_METRIC,)
    return recipe.score.quality or default_metrics


def embedder_errors(recipe: ParsedRecipe, data: Mapping[str, Split]) -> list[Finding]:
    """Return errors for metrics and gates that need scores that the samples do not have."""
    scored = dict.fromkeys(["test", recipe.judged_on or "test"])
    split = next((name for name in scored if name in data and not data[name].has_labels), None)
    if split is None:
        return []
    metric_paths: list[tuple[tuple[str | int, ...], str]] = [
        (("score", "quality", index), metric) for index, metric in enumerate(recipe.score.quality)
    ]
    metric_paths += [(("gates", metric), metric) for metric in recipe.gates]
    problem = f"needs scored pairs, but the {split} samples have no scores (column 'label'). Add them, or use"
    return [
        (path, error_message("missing-scores", f"'{metric}' {problem} {AGREEMENT_METRIC}."))
        for path, metric in metric_paths
        if metric in CORRELATION_METRICS
    ]


def resolve_text_rules(recipe: ParsedRecipe, folder: Path) -> tuple[TextRules, list[str]]:
    """Return the text rules of `recipe` for the model in `folder`, and their description for the plan.

    Values that the recipe does not set come from the model: from its text.json, if smelt made it, else the
    chat template of its tokenizer, or the prefix from `task_specific_params` in its config, as in T5
    checkpoints.

    Raises:
        InputError: settings do not fit the task or the model, or required ones are missing.
    """
    if recipe.traits.architecture != "encoder-decoder":
        return _other_rules(recipe, folder)
    _require_task(recipe, ("prompt_template",), task_names(samples="prompts"))
    data = recipe.data
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


def _other_rules(recipe: ParsedRecipe, folder: Path) -> tuple[TextRules, list[str]]:
    """Return the text rules of a task without languages.

    Raises:
        InputError: `does-not-fit-task`, or as `prompt_rules` and `_embedder_text_rules`.
    """
    languages = ("prefix", "source_language", "target_language")[recipe.traits.output == "embedding" :]
    _require_task(recipe, languages, task_names(architecture="encoder-decoder", modality="text"))
    if recipe.traits.samples == "prompts":
        return prompt_rules(recipe, folder)
    _require_task(recipe, ("prompt_template",), task_names(samples="prompts"))
    return _embedder_text_rules(recipe, folder) if recipe.traits.output == "embedding" else (TextRules(), [])


def _require_task(recipe: ParsedRecipe, names: Sequence[str], tasks: str) -> None:
    """Require that the recipe sets none of the settings `names` of `data`, which are for `tasks`."""
    unsupported = [name for name in names if getattr(recipe.data, name) is not None]
    if unsupported:
        raise InputError(
            f"{unsupported[0]}: only for {tasks}; the task is {recipe.task}. Remove it.",
            code="does-not-fit-task",
            setting=f"data.{unsupported[0]}",
        )


def _embedder_text_rules(recipe: ParsedRecipe, folder: Path) -> tuple[TextRules, list[str]]:
    """Return the text rules of a sentence embedder: prefix and lower case.

    Raises:
        InputError: the model has a default prompt in sentence-transformers, and the recipe sets no prefix.
    """
    text_rules, sentence_rules = read_text_rules(folder), read_sentence_rules(folder)
    prefix = text_rules.prefix if recipe.data.prefix is None else recipe.data.prefix
    prompt = default_prompt(folder)
    if prompt and recipe.data.prefix is None and not (folder / TEXT_RULES_FILE).is_file():
        raise InputError(
            f"{folder / PROMPTS_FILE}: sentence-transformers adds the prompt {prompt!r} to every text of this"
            f' model. Set data: {{prefix: {json.dumps(prompt)}}}, or prefix: "" for none.',
            code="missing-prompt",
        )
    rules = TextRules(
        prefix=prefix, lower=text_rules.lower or (sentence_rules is not None and sentence_rules.lower)
    )
    descriptions = [f"prefix {prefix!r}"] if prefix else []
    return rules, descriptions + (["lowercased"] if rules.lower else [])


def _multilingual_text_rules(
    recipe: ParsedRecipe, folder: Path, family: Family
) -> tuple[TextRules, list[str]]:
    data, text_rules = recipe.data, read_text_rules(folder)
    source = data.source_language or text_rules.source_language
    target = data.target_language or text_rules.target_language
    if source is None or target is None:
        raise InputError(
            f"{with_article(family.name)} model needs a source and a target language, as codes of its"
            f" tokenizer. Set, for example, data: {{source_language: {family.example_languages[0]}, "
            f"target_language: {family.example_languages[1]}}}.",
            code="missing-languages",
        )
    for code in (source, target):
        _check_language_code(code, folder)
    prefix = text_rules.prefix if data.prefix is None else data.prefix
    rules = TextRules(prefix=prefix, source_language=source, target_language=target)
    descriptions = [f"languages {source} to {target}"] + ([f"prefix {prefix!r}"] if prefix else [])
    return rules, descriptions


def _check_language_code(code: str, folder: Path) -> None:
    """Require that tokenizer.json, if there is one, has a token for the language `code`.

    Raises:
        InputError: it has no such token.
    """
    try:
        content = load_json(folder / "tokenizer.json")
        vocabulary = content["model"]["vocab"]  # a unigram model lists its pieces with their scores
        tokens = vocabulary if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary]
        added = [token["content"] for token in content["added_tokens"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # without such a file the tokenizer checks it when it is loaded
    if code not in added and code not in tokens:
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
    task_prefixes = {name: prefix for name, prefix in prefixes.items() if name.startswith(recipe.task)}
    data = recipe.data
    if data.source_language or data.target_language:
        prefix_name = f"{recipe.task}_{data.source_language}_to_{data.target_language}"
        if prefix_name not in task_prefixes:
            available = ", ".join(task_prefixes) or "none"
            raise InputError(
                f"source_language and target_language: the model's config has no prefix for {prefix_name}"
                f" (task_specific_params: {available}). Set data: {{prefix: ...}} instead.",
                code="unknown-language",
            )
        task_prefixes = {prefix_name: task_prefixes[prefix_name]}
    if len(task_prefixes) == 1:
        [(name, prefix)] = task_prefixes.items()
        return TextRules(prefix=prefix), [f"prefix {prefix!r} (from the model, for {name})"]
    if task_prefixes:
        return TextRules(), [
            f"no prefix; the model's config has several, for {', '.join(task_prefixes)}. Set"
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
