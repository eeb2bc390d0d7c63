"""Check the model of a recipe, and from its config that every step fits its input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError
from smelt.core.files import resolve_path
from smelt.core.messages import Message, error_message, info
from smelt.models.families.registry import FAMILIES_BY_TASK, QUANTIZED_CONVOLUTIONS_KEY, no_blocks_reason
from smelt.models.text_rules import position_limit
from smelt.pipeline.inspect.model_folder import (
    check_model_folder,
    local_model_folder,
    read_config,
    read_config_file,
)
from smelt.pipeline.inspect.model_info import inspect_quantization
from smelt.pipeline.plan.check_context import CheckContext, skip_if_invalid
from smelt.pipeline.plan.quantized_steps import prequantized_errors, qat_errors
from smelt.pipeline.plan.task_checks import (
    embedder_errors,
    metrics_of_samples,
    prompt_errors,
    resolve_pooling,
    resolve_text_rules,
)
from smelt.pipeline.plan.untrained_checks import config_file, read_untrained_config
from smelt.pipeline.recipe.model_and_data import UntrainedModel
from smelt.pipeline.recipe.stages import MODEL_STEP
from smelt.pipeline.recipe.validation_errors import Finding, error_findings

# Keys that `resolve_text_rules` reads.
_TEXT_KEYS = ("data.prefix", "data.source_language", "data.target_language", "data.prompt_template")


@skip_if_invalid("model")
def read_model_folder(context: CheckContext) -> Iterator[Finding]:
    """Find the model's folder and check its files; a hub id is downloaded by the run."""
    recipe, model = context.recipe, context.recipe.model
    if not isinstance(model, str) or context.start_format == "onnx":  # other checks read these
        return
    if not model.strip() or "\0" in model:
        text = "expected a model's folder or a hub id, got an empty name."
        yield ("model",), error_message("empty-text", text)
        return
    problems: list[Message]
    try:
        folder = local_model_folder(model, recipe.base)
        if folder is None:
            text = f"'{model}' is not a local folder; the run downloads it from the hub."
            yield (), info("from-the-hub", text)
            return
        task = None if context.is_invalid("task") else recipe.task
        problems, advice = check_model_folder(folder, task, recipe.baseline == MODEL_STEP)
    except (OSError, RuntimeError) as error:  # too long a name, a home folder that does not exist
        problems, advice, folder = [error_message("unreadable-file", f"cannot be read: {error}.")], [], None
    for problem in problems:
        yield ("model",), problem
    for message in advice:
        yield (), message.with_prefix("model: ")
    context.model_folder = folder


@skip_if_invalid("model", "task", *_TEXT_KEYS)
def check_text_rules(context: CheckContext) -> Iterator[Finding]:
    """Check prefix, languages and prompt template, if the config can be read and its family fits the task."""
    recipe = context.recipe
    if isinstance(recipe.model, UntrainedModel):
        folder: Path | None = resolve_path(recipe.base, recipe.model.config)
        config = config_file(recipe.model, recipe.base)
    elif context.start_format == "torch" and context.model_folder is not None:
        folder = context.model_folder
        config = folder / "config.json"
    else:
        return
    if read_config_file(config)[0].get("model_type") in FAMILIES_BY_TASK[recipe.task]:
        assert folder is not None
        try:
            resolve_text_rules(recipe, folder)
        except InputError as error:
            yield from error_findings(("data",), error)


@skip_if_invalid("task", "model", *_TEXT_KEYS)
def check_prompts(context: CheckContext) -> Iterator[Finding]:
    """Check that the prompt template fits the samples that were read."""
    recipe, folder = context.recipe, context.model_folder
    if not isinstance(recipe.model, str):
        folder = recipe.base / recipe.model.config
    if folder is None:
        return
    try:
        yield from prompt_errors(recipe, folder, context.splits)
    except InputError:  # of the template itself; `check_text_rules` reports it
        return


@skip_if_invalid("task")
def resolve_embedder(context: CheckContext) -> Iterator[Finding]:
    """Check an embedder's folder and metrics, as far as they are available, and set its default metrics."""
    recipe, folder = context.recipe, context.model_folder
    if recipe.traits.output != "embedding":
        return
    if folder is not None and not context.is_invalid("model", "embedding"):
        try:
            for message in resolve_pooling(recipe, folder)[1]:
                yield (), message
        except InputError as error:
            yield from error_findings(("model",), error)
    if "test" not in context.splits or context.is_invalid("score.quality"):
        return
    yield from embedder_errors(recipe, context.splits)
    metrics = metrics_of_samples(recipe, context.splits["test"])
    score = recipe.score.model_copy(update={"quality": metrics})
    context.recipe = recipe.model_copy(update={"score": score})


def start_config(context: CheckContext) -> Mapping[str, Any] | None:
    """Return the config that a recipe starts from; None if it cannot be read or is not downloaded yet."""
    model = context.recipe.model
    if isinstance(model, UntrainedModel):
        config, problems = read_untrained_config(config_file(model, context.recipe.base))
    elif context.model_folder is not None:
        config, problems = read_config(context.model_folder)
    else:
        return None
    return None if problems else config


def check_model_configs(context: CheckContext) -> Iterator[Finding]:
    """Propagate the model's config through the tree of steps, and check that every step fits its input."""
    config = start_config(context)
    if config is None:
        return
    if context.model_folder is not None:
        quantization = inspect_quantization(context.model_folder, config)
        for name, message in [
            *prequantized_errors(context.steps, quantization),
            *qat_errors(context.steps, quantization),
        ]:
            yield context.setting_path(name), message
        if quantization is not None and no_blocks_reason(config) is not None:
            config = {**config, QUANTIZED_CONVOLUTIONS_KEY: True}
    configs: dict[str, Mapping[str, Any]] = {MODEL_STEP: config}
    for step in context.steps:
        parent_config = configs.get(step.parent)
        if parent_config is None:
            continue
        errors, step_config = step.stage_class.check_model(step.settings, parent_config)
        if not errors and not step.invalid_settings:
            references = step.settings.step_references().items()
            teachers = {setting: configs[name] for setting, name in references if name in configs}
            errors = step.stage_class.check_teachers(step.settings, step_config, teachers)
        yield from context.setting_findings(step, errors)
        # with invalid settings the output config is unknown, unless the stage does not change it
        if step_config is parent_config or not step.invalid_settings:
            configs[step.name] = step_config


def check_window_length(context: CheckContext) -> Iterator[Finding]:
    """Check that windows are not longer than the model's number of positions."""
    length = context.recipe.data.windows.length
    limit = position_limit(start_config(context) or {})
    if length is not None and limit is not None and length > limit:
        text = f"{length} exceeds the model's limit of {limit} tokens. Set {limit} or less."
        yield ("data", "windows", "length"), error_message("window-too-long", text)
