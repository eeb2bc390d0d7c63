"""Does each stage fit the model and the rows that it will get? Known from config and data, without torch.

A stage that can tell has a class method `check_model(settings, config)`, which returns its mistakes as
messages with their settings, and the config of the model that it leaves: the very same where it says nothing
of it. All others leave the config as it is. One whose settings name other steps may have a class method
`check_named(settings, config, named)`: config is that of the model that it leaves, named are those of the
steps, by setting, as far as they are known. One that cannot do with all rows has a class method
`check_rows(settings, task, data)`, which returns its mistakes likewise, where the recipe has the `task` and
the splits `data` were read. One whose settings name metrics returns them as (setting, metric) from
`metrics_named(settings)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.data import Split, Task
from smelt.core.errors import nearest
from smelt.families.registry import CODED_CONVOLUTIONS, blockless
from smelt.look.coded_model import coded_model
from smelt.look.model_folder import read_config
from smelt.planning.order.coded import coded_mistakes, codes_lacking
from smelt.planning.plan import Step
from smelt.planning.untrained import config_file, read_outline
from smelt.recipe.errors import Mistakes, touches
from smelt.recipe.inputs import Untrained
from smelt.recipe.recipe import Recipe
from smelt.recipe.stages import ROOT
from smelt.runtime.text.limits import position_limit

if TYPE_CHECKING:
    from smelt.recipe.yaml_file import Where


def check_fit(
    steps: Sequence[Step], places: dict[str, Where], recipe: Recipe, folder: Path | None, mistakes: Mistakes
) -> None:
    """Follow the config of the model down the tree of `steps`, and note what does not fit.

    Args:
        steps: parents first.
        places: where the settings of each step stand in the recipe.
        recipe: which may start from a config without weights.
        folder: of the model; None where it is still to be fetched or made.
        mistakes: gets what is wrong.
    """
    config = _config_of(recipe, folder)
    if config is None:
        return
    if folder is not None:
        coded = coded_model(folder, config)
        for name, message, code in [*coded_mistakes(steps, coded), *codes_lacking(steps, coded)]:
            mistakes.add(places[name], message, code=code)
        if coded is not None and blockless(config) is not None:
            config = {**config, CODED_CONVOLUTIONS: True}
    configs: dict[str, Mapping[str, Any]] = {ROOT: config}
    for step in steps:
        before = configs.get(step.parent)
        if before is None:
            continue
        check = getattr(step.cls, "check_model", None)
        found, after = check(step.settings, before) if check else ([], before)
        compare = getattr(step.cls, "check_named", None)
        if compare and not found and not step.wrong:
            references = step.settings.references().items()
            named = {setting: configs[name] for setting, name in references if name in configs}
            found = compare(step.settings, after, named)
        for one in found:
            setting = one.setting or ""
            if setting.partition(".")[0] not in step.wrong:  # of which something is said already
                mistakes.note((*places[step.name], *_place(setting)), one)
        # what a mistaken setting would have left nobody knows, unless the stage leaves the config alone
        if after is before or not step.wrong:
            configs[step.name] = after


def _config_of(recipe: Recipe, folder: Path | None) -> Mapping[str, Any] | None:
    """Return the config that a recipe starts from; None where it cannot be read, or is not there yet."""
    if isinstance(recipe.model, Untrained):
        config, problems = read_outline(config_file(recipe.model, recipe.base))
    elif folder is not None:
        config, problems = read_config(folder)
    else:
        return None
    return None if problems else config


def check_windows(recipe: Recipe, folder: Path | None, mistakes: Mistakes) -> None:
    """Note windows that are longer than what the model has positions for, with weights or without.

    folder: None where the model is still to be fetched or made.
    """
    length = recipe.data.windows.length
    if length is None:
        return
    config: Mapping[str, Any] = {}
    if isinstance(recipe.model, Untrained):
        config, _ = read_outline(config_file(recipe.model, recipe.base))
    elif folder is not None:
        config, _ = read_config(folder)
    limit = position_limit(config)
    if limit is not None and length > limit:
        mistakes.add(
            ("data", "windows", "length"),
            f"{length} is more than the {limit} tokens that the model takes; say {limit} or less.",
            code="window-too-long",
        )


def check_rows(
    steps: Sequence[Step],
    places: dict[str, Where],
    task: Task,
    splits: Mapping[str, Split],
    mistakes: Mistakes,
    bad: set[str],
) -> None:
    """Note what of the settings of each step does not fit the task, or the rows of `splits`.

    bad: what is wrong already, as dotted paths; nothing is concluded from a wrong task.
    """
    if touches(bad, "task"):
        return
    for step in steps:
        check = getattr(step.cls, "check_rows", None)
        for one in check(step.settings, task, splits) if check else ():
            setting = one.setting or ""
            if setting.split(".")[0] not in step.wrong:
                mistakes.note((*places[step.name], *_place(setting)), one)


def check_metrics(
    steps: Sequence[Step], places: dict[str, Where], quality: Sequence[str], mistakes: Mistakes
) -> None:
    """Note the metrics that settings name and the recipe does not score.

    quality: what is scored; empty where the rows of a run decide it, and nothing is concluded.
    """
    for step in steps if quality else ():
        named = getattr(step.cls, "metrics_named", None)
        for setting, metric in named(step.settings) if named else ():
            if metric not in quality and setting.split(".")[0] not in step.wrong:
                mistakes.add(
                    (*places[step.name], *_place(setting)),
                    f"the recipe does not score '{metric}', only {', '.join(quality)}."
                    f"{nearest(metric, quality)}"
                    " Name one of these, or add it to score: {quality: [...]}.",
                    code="metric-not-scored",
                )


def _place(setting: str) -> tuple[str | int, ...]:
    """Return where a setting stands, below its step: `phases.0.losses`."""
    return tuple(int(word) if word.isdigit() else word for word in setting.split(".") if word)
