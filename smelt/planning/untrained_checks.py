"""Check a recipe that starts from an untrained model (a config without weights)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.core.data import CLASSIFICATION_TASKS, IMAGE_CLASSIFICATION
from smelt.core.errors import InputError
from smelt.core.files import read_json_object, resolve_path
from smelt.core.messages import Message, error_message
from smelt.families.registry import FAMILIES_BY_TASK
from smelt.inspect.model_folder import (
    check_tokenizer_files,
    local_model_folder,
    read_config,
    read_config_file,
    unknown_family_message,
    unsupported_config_errors,
)
from smelt.planning.plan import PlanStep
from smelt.recipe.mistakes import Mistakes, has_mistake
from smelt.recipe.model_and_data import NewTokenizer, UntrainedModel
from smelt.recipe.problem_type import has_classifier
from smelt.recipe.recipe import TRAINING_STAGES, ParsedRecipe
from smelt.recipe.stages import MODEL_STEP
from smelt.runtime.images.image_processor import PROCESSOR_FILE, default_processor_config, parse_processor

UNTRAINED_NOT_SCORED = "random weights; the first trained step is the baseline"


def config_file(model: UntrainedModel, base: Path) -> Path:
    """Return the config file of `model`: a .json file, or config.json in a folder."""
    path = resolve_path(base, model.config)
    return path if path.suffix == ".json" else path / "config.json"


def read_untrained_config(file: Path) -> tuple[dict[str, Any], list[Message]]:
    """Return the config of an untrained model, and the mistakes in it.

    The outputs of a new classifier are the labels of the data, unless the config has `id2label`.
    """
    config, problems = read_config_file(file)
    if "id2label" not in config:
        config = {key: value for key, value in config.items() if key != "architectures"}
    return config, problems


def check_untrained(
    recipe: ParsedRecipe, steps: Sequence[PlanStep], mistakes: Mistakes, bad: set[str]
) -> None:
    """Check config and tokenizer, and that the model is trained before it is a teacher or the baseline.

    bad: dotted paths of parts that are known to be invalid.
    """
    model = recipe.model
    if "model" in bad or not isinstance(model, UntrainedModel):
        return
    config, problems = read_config_file(config_file(model, recipe.base))
    for problem in (
        () if has_mistake(bad, "model.config") else [*problems, *unsupported_config_errors(config)]
    ):
        mistakes.add_message(("model", "config"), problem)
    kind = str(config.get("model_type", ""))
    if config and not has_mistake(bad, "task") and kind not in FAMILIES_BY_TASK[recipe.task]:
        mistakes.add_message(("model", "config"), unknown_family_message(kind, recipe.task))
    elif config and not has_mistake(bad, "model.tokenizer"):
        for where, problem in _tokenizer_mistakes(recipe, model, kind, bad):
            mistakes.add_message(("model", "tokenizer", *where), problem)
        for where, problem in _image_mistakes(recipe, model, config):
            mistakes.add_message(("model", *where), problem)
    if "stages" not in bad:
        _check_training_order(recipe, steps, mistakes)


def preprocessor_config(model: UntrainedModel, base: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessor_config.json for an untrained image model.

    Raises:
        InputError: the image size is missing, or the existing file is not supported.
    """
    path = config_file(model, base).parent / PROCESSOR_FILE
    side = model.image_size or config.get("image_size")
    if model.image_size is None and path.is_file():
        values = read_json_object(path)
    elif isinstance(side, int):
        values = default_processor_config(side)
    else:
        raise InputError(
            f"missing. Set the size of the images, such as image_size: 224, or put a {PROCESSOR_FILE} next to"
            " the model's config.",
            code="missing-setting",
        )
    parse_processor(values, path)
    return values


def _image_mistakes(
    recipe: ParsedRecipe, model: UntrainedModel, config: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], Message]]:
    if recipe.task != IMAGE_CLASSIFICATION:
        if model.image_size is not None:
            text = f"only for {IMAGE_CLASSIFICATION}; the task is {recipe.task}. Remove it."
            yield ("image_size",), error_message("does-not-fit-task", text)
        return
    try:
        found = parse_processor(preprocessor_config(model, recipe.base, config), Path(PROCESSOR_FILE)).shape
    except InputError as error:
        yield ("image_size",), error.as_message()
        return
    said = config.get("image_size")
    if isinstance(said, int) and found not in (None, (said, said)):
        size = f"{found[0]} x {found[1]}"
        text = f"the images are {size}, but image_size in the config is {said}. Use the same size."
        yield ("image_size",), error_message("settings-conflict", text)


def _tokenizer_mistakes(
    recipe: ParsedRecipe, model: UntrainedModel, kind: str, bad: set[str]
) -> Iterator[tuple[tuple[str, ...], Message]]:
    """Yield (path below the tokenizer, mistake)."""
    tokenizer = model.tokenizer
    if recipe.task == IMAGE_CLASSIFICATION:
        if tokenizer is not None:
            text = f"not used for {IMAGE_CLASSIFICATION}. Remove it."
            yield (), error_message("does-not-fit-task", text)
        return
    if tokenizer is None:
        text = "missing. Expected a folder with a tokenizer's files, a hub id, or {train: bpe}."
        yield (), error_message("missing-setting", text)
        return
    if isinstance(tokenizer, NewTokenizer):
        from smelt.runtime.text.train_tokenizer import unsupported_tokenizer

        if reason := unsupported_tokenizer(kind, tokenizer.train, tokenizer.vocab_size):
            yield (), error_message("wrong-value", reason)
        if recipe.data.train is None and not has_mistake(bad, "data.train"):
            text = "no training samples to train the tokenizer on. Set data: {train: FILE}."
            yield ("train",), error_message("missing-data", text)
        return
    folder = local_model_folder(tokenizer, recipe.base)
    if folder is not None and not folder.is_dir():
        text = f"{folder}: no such folder. Expected one with a tokenizer's files, or {{train: bpe}}."
        yield (), error_message("missing-folder", text)
    elif folder is not None:
        yield from (((), problem) for problem in check_tokenizer_files(folder, kind))


def _check_training_order(recipe: ParsedRecipe, steps: Sequence[PlanStep], mistakes: Mistakes) -> None:
    if not any(step.stage in TRAINING_STAGES for step in steps):
        words = " or ".join(TRAINING_STAGES)
        mistakes.add(
            ("stages",),
            f"the model has random weights and no step trains it. Add {words}.",
            code="untrained-model",
        )
    elif recipe.baseline == MODEL_STEP:
        mistakes.add(
            ("baseline",),
            f"'{MODEL_STEP}' has random weights. Set baseline to a trained step.",
            code="untrained-baseline",
        )
    _reject_as_teacher(steps, "has random weights", mistakes)


def check_new_classifier(
    recipe: ParsedRecipe, steps: Sequence[PlanStep], folder: Path | None, mistakes: Mistakes
) -> None:
    """Check that an encoder without a classifier, which gets a random one, is not a teacher.

    folder: the model's folder; None if it is not downloaded or created yet, then the stage checks it.
    """
    if recipe.task not in CLASSIFICATION_TASKS or folder is None:
        return
    config, problems = read_config(folder)
    if not problems and not has_classifier(config):
        named = str((config.get("architectures") or ["encoder"])[0])
        why = f"is a {named}, whose new classifier has random weights"
        _reject_as_teacher(steps, why, mistakes)


def _reject_as_teacher(steps: Sequence[PlanStep], reason: str, mistakes: Mistakes) -> None:
    """Add a mistake for every step that would use the original model as teacher."""
    for at, step in enumerate(steps):
        for setting, name in step.settings.step_references().items():
            if name == MODEL_STEP and setting not in step.invalid_settings:
                trained = [s.name for s in steps[:at] if s.stage in TRAINING_STAGES]
                how = (
                    f"Use a trained step ({setting}: {trained[0]})"
                    if trained
                    else f"Put a finetune step before it and set {setting} to that step"
                )
                what = f"{step.name}: {setting}: '{MODEL_STEP}' {reason}. {how}."
                mistakes.add((), what, line=step.line, code="untrained-teacher")
