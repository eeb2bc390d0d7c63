"""Check untrained models (a config without weights) and the labels of classifiers before a run.

The problem type of a classifier (one label, several labels, or a number) comes from the model's config or, if
not set there, from the labels; the metrics depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, combined_error
from smelt.core.files import read_json_object, resolve_path
from smelt.core.messages import Message, error_message
from smelt.data.labels import SINGLE_LABEL, ProblemType, class_names, has_classifier
from smelt.data.splits import Split
from smelt.data.tasks import task_names
from smelt.evaluate.metrics.registry import DEFAULTS_BY_PROBLEM
from smelt.models.families.registry import FAMILIES_BY_TASK
from smelt.pipeline.inspect.find_model import local_model_folder
from smelt.pipeline.inspect.model_folder import (
    check_tokenizer_files,
    read_config,
    read_config_file,
    unknown_family_message,
    unsupported_config_errors,
)
from smelt.pipeline.plan.check_context import CheckContext, skip_if_invalid
from smelt.pipeline.plan.plan import PlanStep
from smelt.pipeline.recipe.model_and_data import (
    NewTokenizer,
    UntrainedModel,
    gate_errors,
    label_errors,
    metric_class_errors,
    metric_errors,
    new_class_names,
    resolve_problem_type,
)
from smelt.pipeline.recipe.recipe import ParsedRecipe
from smelt.pipeline.recipe.stages import MODEL_STEP, training_stages
from smelt.pipeline.recipe.validation_errors import Finding
from smelt.pipeline.recipe.yaml_file import KeyPath
from smelt.runtimes.images import PROCESSOR_FILE, default_processor_config, parse_processor
from smelt.tasks.registry import task_spec

UNTRAINED_NOT_SCORED = "random weights; the first trained step is the baseline"


def config_file(model: UntrainedModel, base: Path) -> Path:
    """Return the config file of `model`: a .json file, or config.json in a folder."""
    path = resolve_path(base, model.config)
    return path if path.suffix == ".json" else path / "config.json"


def read_untrained_config(file: Path) -> tuple[dict[str, Any], list[Message]]:
    """Return the config of an untrained model, and the errors in it.

    The outputs of a new classifier are the labels of the data, unless the config has `id2label`.
    """
    config, problems = read_config_file(file)
    if "id2label" not in config:
        config = {key: value for key, value in config.items() if key != "architectures"}
    return config, problems


def check_untrained(context: CheckContext) -> Iterator[Finding]:
    """Check config and tokenizer, and that the model is trained before it is a teacher or the baseline."""
    recipe, model = context.recipe, context.recipe.model
    if "model" in context.invalid_paths or not isinstance(model, UntrainedModel):
        return
    config, problems = read_config_file(config_file(model, recipe.base))
    if not context.is_invalid("model.config"):
        for problem in [*problems, *unsupported_config_errors(config)]:
            yield ("model", "config"), problem
    kind = str(config.get("model_type", ""))
    if config and not context.is_invalid("task") and kind not in FAMILIES_BY_TASK[recipe.task]:
        yield ("model", "config"), unknown_family_message(kind, recipe.task)
    elif config and not context.is_invalid("model.tokenizer"):
        yield from _tokenizer_errors(context, model, kind)
        yield from _image_errors(recipe, model, config)
    if "stages" not in context.invalid_paths:
        yield from _check_training_order(context)


def preprocessor_config(model: UntrainedModel, base: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessor_config.json for an untrained image model.

    Raises:
        InputError: the image size is missing, or the existing file is not supported.
    """
    path = config_file(model, base).parent / PROCESSOR_FILE
    image_size = model.image_size or config.get("image_size")
    if model.image_size is None and path.is_file():
        values = read_json_object(path)
    elif isinstance(image_size, int):
        values = default_processor_config(image_size)
    else:
        raise InputError(
            f"missing. Set the size of the images, such as image_size: 224, or put a {PROCESSOR_FILE} next to"
            " the model's config.",
            code="missing-setting",
        )
    parse_processor(values, path)
    return values


def _image_errors(
    recipe: ParsedRecipe, model: UntrainedModel, config: Mapping[str, Any]
) -> Iterator[Finding]:
    path: KeyPath = ("model", "image_size")
    if recipe.traits.modality == "image-and-text":
        text = f"a model for {recipe.task} is not made from a config. Make its folder with transformers."
        yield ("model", "config"), error_message("does-not-fit-task", text)
        return
    if recipe.traits.modality != "image":
        if model.image_size is not None:
            text = f"only for {task_names(modality='image')}; the task is {recipe.task}. Remove it."
            yield path, error_message("does-not-fit-task", text)
        return
    try:
        image_shape = parse_processor(
            preprocessor_config(model, recipe.base, config), Path(PROCESSOR_FILE)
        ).shape
    except InputError as error:
        yield path, error.as_message()
        return
    config_size = config.get("image_size")
    if isinstance(config_size, int) and image_shape not in (None, (config_size, config_size)):
        size = f"{image_shape[0]} x {image_shape[1]}"
        text = f"the images are {size}, but image_size in the config is {config_size}. Use the same size."
        yield path, error_message("settings-conflict", text)


def _tokenizer_errors(context: CheckContext, model: UntrainedModel, kind: str) -> Iterator[Finding]:
    recipe, tokenizer = context.recipe, model.tokenizer
    path: KeyPath = ("model", "tokenizer")
    if recipe.traits.modality == "image":
        if tokenizer is not None:
            text = f"not used for {task_names(modality='image')}. Remove it."
            yield path, error_message("does-not-fit-task", text)
        return
    if tokenizer is None:
        text = "missing. Expected a folder with a tokenizer's files, a hub id, or {train: bpe}."
        yield path, error_message("missing-setting", text)
        return
    if isinstance(tokenizer, NewTokenizer):
        from smelt.models.new_model import unsupported_tokenizer

        if reason := unsupported_tokenizer(kind, tokenizer.train, tokenizer.vocab_size):
            yield path, error_message("wrong-value", f"This tokenizer cannot be trained: {reason}")
        if recipe.data.train is None and not context.is_invalid("data.train"):
            text = "no training samples to train the tokenizer on. Set data: {train: FILE}."
            yield (*path, "train"), error_message("missing-data", text)
        return
    folder = local_model_folder(tokenizer, recipe.base)
    if folder is not None and not folder.is_dir():
        text = f"{folder}: no such folder. Expected one with a tokenizer's files, or {{train: bpe}}."
        yield path, error_message("missing-folder", text)
    elif folder is not None:
        yield from ((path, problem) for problem in check_tokenizer_files(folder, kind))


def _check_training_order(context: CheckContext) -> Iterator[Finding]:
    # of a step with invalid settings the stage is known; it is missing from context.steps
    stage_classes = [draft.stage_class for draft in context.drafts.values() if draft.stage_class]
    if not any(stage_class.trains_weights for stage_class in stage_classes):
        stage_list = " or ".join(training_stages())
        text = f"the model has random weights and no step trains it. Add {stage_list}."
        yield ("stages",), error_message("untrained-model", text)
    elif context.recipe.baseline == MODEL_STEP:
        text = f"'{MODEL_STEP}' has random weights. Set baseline to a trained step."
        yield ("baseline",), error_message("untrained-baseline", text)
    yield from _teacher_errors(context.steps, "has random weights")


def check_new_classifier(context: CheckContext) -> Iterator[Finding]:
    """Check that an encoder without a classifier, which gets a random one, is not a teacher.

    Of a model that is not downloaded or created yet, the stage checks it.
    """
    recipe, folder = context.recipe, context.model_folder
    if not recipe.traits.classifies or folder is None:
        return
    config, problems = read_config(folder)
    if not problems and not has_classifier(config, recipe.task):
        architecture = str((config.get("architectures") or ["encoder"])[0])
        reason = f"is a {architecture}, whose new classifier has random weights"
        yield from _teacher_errors(context.steps, reason)


def _teacher_errors(steps: Sequence[PlanStep], reason: str) -> Iterator[Finding]:
    """Yield an error for every step that would use the original model as teacher."""
    for position, step in enumerate(steps):
        for setting, name in step.settings.step_references().items():
            if name == MODEL_STEP and setting not in step.invalid_settings:
                trained_names = [s.name for s in steps[:position] if s.stage_class.trains_weights]
                remedy = (
                    f"Use a trained step ({setting}: {trained_names[0]})"
                    if trained_names
                    else f"Put a finetune step before it and set {setting} to that step"
                )
                message = f"{step.name}: {setting}: '{MODEL_STEP}' {reason}. {remedy}."
                yield (), error_message("untrained-teacher", message, line=step.line)


@skip_if_invalid("task", "model")
def resolve_classifier(context: CheckContext) -> Iterator[Finding]:
    """Check labels and metrics of a classifier, as far as model and data are available.

    Sets the default metrics, and the problem type if it is known before the run.
    """
    recipe, folder = context.recipe, context.model_folder
    untrained = recipe.model if isinstance(recipe.model, UntrainedModel) else None
    if not recipe.traits.classifies or (folder is None and untrained is None):
        return
    if untrained is not None:
        config, problems = read_untrained_config(config_file(untrained, recipe.base))
    else:
        assert folder is not None
        config, problems = read_config(folder)
    if problems:
        return
    splits = _label_splits(recipe, context.splits)
    are_all_read = set(splits) == set(recipe.data.split_sources())
    if not are_all_read and not has_classifier(config, recipe.task):
        return  # the problem type of a new classifier depends on all labels
    try:
        problem = _problem_type(recipe, config, splits)
    except InputError as error:
        yield ("model",), error_message(error.code, f"{folder or recipe.model}: {error}")
        return
    context.problem_type = problem if are_all_read else None
    for name, label_error in label_errors(config, splits, problem, recipe.task):
        yield ("data", name), label_error
    if are_all_read and not has_classifier(config, recipe.task):
        yield from _head_name_errors(recipe, new_class_names(splits, problem))
    is_known = are_all_read or bool(config.get("problem_type"))
    if _has_problem_types(recipe) and is_known and not context.is_invalid("score.quality"):
        yield from _check_metrics(context, config, splits, problem)


def _head_name_errors(recipe: ParsedRecipe, names: Sequence[str]) -> Iterator[Finding]:
    try:
        task_spec(recipe.task).head_names(names)
    except InputError as error:
        yield ("data",), error.as_message()


def _check_metrics(
    context: CheckContext, config: Mapping[str, Any], splits: Mapping[str, Split], problem: ProblemType
) -> Iterator[Finding]:
    """Check the metrics of a problem type, and set its default ones."""
    recipe = context.recipe
    names = class_names(config) if has_classifier(config, recipe.task) else new_class_names(splits, problem)
    for index, label_error in metric_errors(recipe.score.quality, problem, len(names)):
        yield ("score", "quality", index), label_error
    for index, label_error in metric_class_errors(recipe.score.quality, recipe.metric_settings, names):
        yield ("score", "quality", index), label_error
    metrics = recipe.score.quality or DEFAULTS_BY_PROBLEM[problem]
    if not recipe.score.quality:
        for gate, label_error in gate_errors(recipe.gates, metrics, problem):
            yield ("gates", gate), label_error
    score = recipe.score.model_copy(update={"quality": metrics})
    context.recipe = recipe.model_copy(update={"score": score})


def _has_problem_types(recipe: ParsedRecipe) -> bool:
    """Return whether the samples of the task may have a class, several classes or a number."""
    return recipe.traits.output == "labels"


def _problem_type(recipe: ParsedRecipe, config: Mapping[str, Any], data: Mapping[str, Split]) -> ProblemType:
    """Return the problem type; a tag of a word is always one of several classes."""
    return resolve_problem_type(config, data, recipe.task) if _has_problem_types(recipe) else SINGLE_LABEL


def planned_classifier(context: CheckContext, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `config` with the classifier that the run gives the model: its labels and problem type.

    An encoder without a classifier gets one for the labels of the data. If not all splits were read, these
    are unknown and `config` is returned.
    """
    recipe, problem = context.recipe, context.problem_type
    if not recipe.traits.classifies or problem is None:
        return config
    if has_classifier(config, recipe.task):
        return {**config, "problem_type": problem} if _has_problem_types(recipe) else config
    splits = _label_splits(recipe, context.splits)
    try:
        names = task_spec(recipe.task).head_names(new_class_names(splits, problem))
    except InputError:  # reported by `resolve_classifier`
        return config
    return {
        **config,
        "architectures": [recipe.traits.auto_class],
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
        "problem_type": problem,
    }


def _label_splits(recipe: ParsedRecipe, splits: Mapping[str, Split]) -> dict[str, Split]:
    """Return `splits` with an example for each label."""
    spec = task_spec(recipe.task)
    return {
        name: replace(split, examples=tuple(spec.label_examples(split.examples)))
        for name, split in splits.items()
    }


def resolve_labels(
    recipe: ParsedRecipe, file: Path, data: Mapping[str, Split], problem: ProblemType | None
) -> tuple[tuple[ProblemType, list[str]], tuple[str, ...]]:
    """Determine the problem type, check all labels, and choose the metrics.

    Args:
        recipe: the recipe.
        file: the model's config.json.
        data: all splits.
        problem: the problem type, if the plan determined it.

    Returns:
        The problem type with the class names for a new classifier, and the metrics.

    Raises:
        InputError: labels, metrics or gates do not fit the model; the message lists every error.
    """
    config, _ = (read_config_file if isinstance(recipe.model, str) else read_untrained_config)(file)
    data = _label_splits(recipe, data)
    problem = problem or _problem_type(recipe, config, data)
    errors = [error for _, error in label_errors(config, data, problem, recipe.task)]
    new_names = task_spec(recipe.task).head_names(new_class_names(data, problem))
    if not _has_problem_types(recipe):
        if errors:
            raise combined_error(errors)
        return (problem, new_names), recipe.score.quality
    names = class_names(config) if has_classifier(config, recipe.task) else new_names
    quality = metric_errors(recipe.score.quality, problem, len(names))
    quality += metric_class_errors(recipe.score.quality, recipe.metric_settings, names)
    errors += [error.with_prefix("score.quality: ") for _, error in quality]
    metrics = recipe.score.quality or DEFAULTS_BY_PROBLEM[problem]
    errors += [error.with_prefix("gates: ") for _, error in gate_errors(recipe.gates, metrics, problem)]
    if errors:
        raise combined_error(errors)
    return (problem, new_names), metrics
