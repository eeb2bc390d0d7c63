"""A recipe that starts from a config without weights: what is checked before any work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.core.data import CLASSIFICATION, IMAGES
from smelt.core.errors import InputError
from smelt.core.files import placed, read_json
from smelt.core.messages import Message, mistake
from smelt.families.registry import BY_TASK
from smelt.look.model_folder import (
    check_tokenizer,
    local_folder,
    read_config,
    read_config_file,
    refused,
    unknown_family,
)
from smelt.planning.plan import Step
from smelt.recipe.errors import Mistakes, touches
from smelt.recipe.inputs import NewTokenizer, Untrained
from smelt.recipe.problem import has_classifier
from smelt.recipe.recipe import TRAINING_STAGES, Recipe
from smelt.recipe.stages import ROOT
from smelt.runtime.images.processor import FILE, default_settings, processor_of

NOT_SCORED = "its weights are random; the first trained step is the baseline"


def config_file(model: Untrained, base: Path) -> Path:
    """Return the file that `config` means: itself, or config.json in the folder."""
    path = placed(base, model.config)
    return path if path.suffix == ".json" else path / "config.json"


def read_outline(file: Path) -> tuple[dict[str, Any], list[Message]]:
    """Read the config of a model without weights; return it and what is wrong.

    The outputs of a new classifier are the labels of the data, whatever class the config names, unless
    it names the outputs too.
    """
    config, problems = read_config_file(file)
    if "id2label" not in config:
        config = {key: value for key, value in config.items() if key != "architectures"}
    return config, problems


def check_untrained(recipe: Recipe, steps: Sequence[Step], mistakes: Mistakes, bad: set[str]) -> None:
    """Check config and tokenizer, and that the model is trained before it is a teacher or the baseline.

    bad: what is wrong already, as dotted paths, and of which nothing more is said.
    """
    model = recipe.model
    if "model" in bad or not isinstance(model, Untrained):
        return
    config, problems = read_config_file(config_file(model, recipe.base))
    for problem in () if touches(bad, "model.config") else [*problems, *refused(config)]:
        mistakes.note(("model", "config"), problem)
    kind = str(config.get("model_type", ""))
    if config and not touches(bad, "task") and kind not in BY_TASK[recipe.task]:
        mistakes.note(("model", "config"), unknown_family(kind, recipe.task))
    elif config and not touches(bad, "model.tokenizer"):
        for where, problem in _tokenizer_mistakes(recipe, model, kind, bad):
            mistakes.note(("model", "tokenizer", *where), problem)
        for where, problem in _image_mistakes(recipe, model, config):
            mistakes.note(("model", *where), problem)
    if "stages" not in bad:
        _check_training(recipe, steps, mistakes)


def processor_settings(model: Untrained, base: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessor_config.json of a model of images that is started from its config.

    Raises:
        InputError: nobody says how large its images are, or what says it is not followed.
    """
    path = config_file(model, base).parent / FILE
    side = model.image_size or config.get("image_size")
    if model.image_size is None and path.is_file():
        values = read_json(path)
    elif isinstance(side, int):
        values = default_settings(side)
    else:
        raise InputError(
            f"missing; say how large its images are, image_size: 224, or put a {FILE} beside its config.",
            code="missing-setting",
        )
    processor_of(values, path)
    return values


def _image_mistakes(
    recipe: Recipe, model: Untrained, config: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], Message]]:
    if recipe.task != IMAGES:
        if model.image_size is not None:
            text = f"is for {IMAGES}; a model for {recipe.task} reads no images."
            yield ("image_size",), mistake("does-not-fit-task", text)
        return
    try:
        found = processor_of(processor_settings(model, recipe.base, config), Path(FILE)).shape
    except InputError as error:
        yield ("image_size",), error.as_message()
        return
    said = config.get("image_size")
    if isinstance(said, int) and found not in (None, (said, said)):
        text = f"its images are {found[0]} x {found[1]}, and its config says {said}."
        yield ("image_size",), mistake("settings-conflict", text)


def _tokenizer_mistakes(
    recipe: Recipe, model: Untrained, kind: str, bad: set[str]
) -> Iterator[tuple[tuple[str, ...], Message]]:
    """Yield where in the tokenizer's settings something is wrong, and what."""
    tokenizer = model.tokenizer
    if recipe.task == IMAGES:
        if tokenizer is not None:
            text = f"means nothing for {IMAGES}, where no text is read; leave it out."
            yield (), mistake("does-not-fit-task", text)
        return
    if tokenizer is None:
        text = "missing; expected a folder with a tokenizer's files, a hub id, or {train: bpe}."
        yield (), mistake("missing-setting", text)
        return
    if isinstance(tokenizer, NewTokenizer):
        from smelt.runtime.text.new_tokenizer import refusal

        if reason := refusal(kind, tokenizer.train, tokenizer.vocab_size):
            yield (), mistake("wrong-value", reason)
        if recipe.data.train is None and not touches(bad, "data.train"):
            text = "there are no training rows to learn it from; name some: data: {train: FILE}."
            yield ("train",), mistake("missing-data", text)
        return
    folder = local_folder(tokenizer, recipe.base)
    if folder is not None and not folder.is_dir():
        text = f"{folder}: no such folder; expected one with a tokenizer's files, or {{train: bpe}}."
        yield (), mistake("missing-folder", text)
    elif folder is not None:
        yield from (((), problem) for problem in check_tokenizer(folder, kind))


def _check_training(recipe: Recipe, steps: Sequence[Step], mistakes: Mistakes) -> None:
    if not any(step.stage in TRAINING_STAGES for step in steps):
        words = " or ".join(TRAINING_STAGES)
        mistakes.add(
            ("stages",),
            f"no step trains the model, whose weights are random; add {words}.",
            code="untrained-model",
        )
    elif recipe.baseline == ROOT:
        mistakes.add(
            ("baseline",),
            f"'{ROOT}' has random weights; name a step that is trained.",
            code="untrained-baseline",
        )
    _refuse_as_teacher(steps, "has random weights", mistakes)


def check_new_head(recipe: Recipe, steps: Sequence[Step], folder: Path | None, mistakes: Mistakes) -> None:
    """Check that a bare encoder, which gets a classifier of random weights, is nobody's teacher.

    folder: the model's, or None where it is still to be fetched or made; then the stage itself notices.
    """
    if recipe.task not in CLASSIFICATION or folder is None:
        return
    config, problems = read_config(folder)
    if not problems and not has_classifier(config):
        named = str((config.get("architectures") or ["encoder"])[0])
        why = f"is a bare {named}, whose new classifier has random weights"
        _refuse_as_teacher(steps, why, mistakes)


def _refuse_as_teacher(steps: Sequence[Step], why: str, mistakes: Mistakes) -> None:
    """Note every step that would learn from the untouched model."""
    for at, step in enumerate(steps):
        for setting, name in step.settings.references().items():
            if name == ROOT and setting not in step.wrong:
                trained = [s.name for s in steps[:at] if s.stage in TRAINING_STAGES]
                how = (
                    f"name a step that is trained ({setting}: {trained[0]})"
                    if trained
                    else f"put a finetune before it and name that as the {setting}"
                )
                what = f"{step.name}: {setting}: '{ROOT}' {why}; {how}."
                mistakes.add((), what, line=step.line, code="untrained-teacher")
