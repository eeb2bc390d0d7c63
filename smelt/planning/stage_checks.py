"""Check from config and data, without torch, that each stage fits its input model and samples.

Optional class methods of stages:

check_model(settings, config): returns the mistakes as messages with their settings, and the config of the
    output model (the same object if unchanged). Stages without it do not change the config.
check_teachers(settings, config, named): for settings that name other steps. config: of the output model;
    named: the configs of the named steps, by setting, as far as they are known.
check_rows(settings, task, data): returns the mistakes regarding the samples in the splits `data`.
required_metrics(settings): returns the metrics that settings name, as (setting, metric).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.data import Split, Task
from smelt.core.errors import did_you_mean
from smelt.families.registry import QUANTIZED_CONVOLUTIONS_KEY, no_blocks_reason
from smelt.inspect.model_folder import read_config
from smelt.inspect.quantized_model import inspect_quantization
from smelt.planning.order.quantized_steps import prequantized_mistakes, qat_mistakes
from smelt.planning.plan import PlanStep
from smelt.planning.untrained_checks import config_file, read_untrained_config
from smelt.recipe.mistakes import Mistakes, has_mistake
from smelt.recipe.model_and_data import UntrainedModel
from smelt.recipe.recipe import ParsedRecipe
from smelt.recipe.stages import MODEL_STEP
from smelt.runtime.text.length_limits import position_limit

if TYPE_CHECKING:
    from smelt.recipe.yaml_file import KeyPath


def check_model_configs(
    steps: Sequence[PlanStep],
    setting_paths: dict[str, KeyPath],
    recipe: ParsedRecipe,
    folder: Path | None,
    mistakes: Mistakes,
) -> None:
    """Propagate the model's config through the tree of `steps`, and add mistakes where a step does not fit.

    Args:
        steps: parents first.
        setting_paths: path of each step's settings in the recipe.
        recipe: the recipe, which may start from a config without weights.
        folder: the model's folder; None if it is not downloaded or created yet.
        mistakes: receives the mistakes.
    """
    config = _start_config(recipe, folder)
    if config is None:
        return
    if folder is not None:
        coded = inspect_quantization(folder, config)
        for name, message, code in [*prequantized_mistakes(steps, coded), *qat_mistakes(steps, coded)]:
            mistakes.add(setting_paths[name], message, code=code)
        if coded is not None and no_blocks_reason(config) is not None:
            config = {**config, QUANTIZED_CONVOLUTIONS_KEY: True}
    configs: dict[str, Mapping[str, Any]] = {MODEL_STEP: config}
    for step in steps:
        before = configs.get(step.parent)
        if before is None:
            continue
        check = getattr(step.stage_class, "check_model", None)
        found, after = check(step.settings, before) if check else ([], before)
        compare = getattr(step.stage_class, "check_teachers", None)
        if compare and not found and not step.invalid_settings:
            references = step.settings.step_references().items()
            named = {setting: configs[name] for setting, name in references if name in configs}
            found = compare(step.settings, after, named)
        for one in found:
            setting = one.setting or ""
            if setting.partition(".")[0] not in step.invalid_settings:  # those were reported already
                mistakes.add_message((*setting_paths[step.name], *_setting_path(setting)), one)
        # with invalid settings the output config is unknown, unless the stage does not change it
        if after is before or not step.invalid_settings:
            configs[step.name] = after


def _start_config(recipe: ParsedRecipe, folder: Path | None) -> Mapping[str, Any] | None:
    """Return the config that a recipe starts from; None if it cannot be read or is not downloaded yet."""
    if isinstance(recipe.model, UntrainedModel):
        config, problems = read_untrained_config(config_file(recipe.model, recipe.base))
    elif folder is not None:
        config, problems = read_config(folder)
    else:
        return None
    return None if problems else config


def check_window_length(recipe: ParsedRecipe, folder: Path | None, mistakes: Mistakes) -> None:
    """Add a mistake if windows are longer than the model's number of positions.

    folder: None if the model is not downloaded or created yet.
    """
    length = recipe.data.windows.length
    if length is None:
        return
    config: Mapping[str, Any] = {}
    if isinstance(recipe.model, UntrainedModel):
        config, _ = read_untrained_config(config_file(recipe.model, recipe.base))
    elif folder is not None:
        config, _ = read_config(folder)
    limit = position_limit(config)
    if limit is not None and length > limit:
        mistakes.add(
            ("data", "windows", "length"),
            f"{length} exceeds the model's limit of {limit} tokens. Set {limit} or less.",
            code="window-too-long",
        )


def check_stage_data(
    steps: Sequence[PlanStep],
    setting_paths: dict[str, KeyPath],
    task: Task,
    splits: Mapping[str, Split],
    mistakes: Mistakes,
    bad: set[str],
) -> None:
    """Add the mistakes in settings that do not fit the task or the samples of `splits`.

    bad: dotted paths of parts that are known to be invalid; with an invalid task nothing is checked.
    """
    if has_mistake(bad, "task"):
        return
    for step in steps:
        check = getattr(step.stage_class, "check_rows", None)
        for one in check(step.settings, task, splits) if check else ():
            setting = one.setting or ""
            if setting.split(".")[0] not in step.invalid_settings:
                mistakes.add_message((*setting_paths[step.name], *_setting_path(setting)), one)


def check_stage_metrics(
    steps: Sequence[PlanStep], setting_paths: dict[str, KeyPath], quality: Sequence[str], mistakes: Mistakes
) -> None:
    """Add a mistake for each metric that settings name and the recipe does not score.

    quality: the scored metrics; empty if they depend on the data, then nothing is checked.
    """
    for step in steps if quality else ():
        named = getattr(step.stage_class, "required_metrics", None)
        for setting, metric in named(step.settings) if named else ():
            if metric not in quality and setting.split(".")[0] not in step.invalid_settings:
                mistakes.add(
                    (*setting_paths[step.name], *_setting_path(setting)),
                    f"'{metric}' is not scored, only {', '.join(quality)}."
                    f"{did_you_mean(metric, quality)}"
                    " Choose one of these, or add it to score: {quality: [...]}.",
                    code="metric-not-scored",
                )


def _setting_path(setting: str) -> tuple[str | int, ...]:
    """Return the path of a setting such as `phases.0.losses` relative to its step."""
    return tuple(int(word) if word.isdigit() else word for word in setting.split(".") if word)
