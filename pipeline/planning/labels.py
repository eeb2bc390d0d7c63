"""What can be known of a classifier's labels and metrics before the first step of a run.

The task says only text-classification. Whether a text has one label, several, or a number is in the
model's config or, where that does not say it, in the labels; the metrics follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from smelt.core.data import CLASSIFICATION, Split
from smelt.core.errors import InputError, together
from smelt.core.labels import ProblemType
from smelt.look.model_folder import read_config, read_config_file
from smelt.planning.untrained import config_file, read_outline
from smelt.recipe.errors import Mistakes, touches
from smelt.recipe.inputs import Untrained
from smelt.recipe.problem import (
    METRICS_OF,
    gate_mistakes,
    has_classifier,
    label_mistakes,
    metric_mistakes,
    new_names,
    problem_of,
)
from smelt.recipe.recipe import Recipe


def check_classifier(
    recipe: Recipe, folder: Path | None, splits: Mapping[str, Split], mistakes: Mistakes, bad: set[str]
) -> tuple[Recipe, ProblemType | None]:
    """Check labels and metrics of a classification as far as model and data are at hand.

    Args:
        recipe: as it was read.
        folder: the model's, or None where it is still to be fetched or made.
        splits: the rows that were read already.
        mistakes: gets what is wrong.
        bad: what is wrong already, as dotted paths, and of which nothing more is said.

    Returns:
        The recipe, its metrics filled in where it names none; the problem type, None where the run
        has to find it out.
    """
    untrained = recipe.model if isinstance(recipe.model, Untrained) else None
    here = folder is not None or untrained is not None
    if recipe.task not in CLASSIFICATION or touches(bad, "task", "model") or not here:
        return recipe, None
    if untrained is not None:
        config, problems = read_outline(config_file(untrained, recipe.base))
    else:
        assert folder is not None
        config, problems = read_config(folder)
    if problems:
        return recipe, None
    whole = set(splits) == set(recipe.data.splits())
    if not whole and not has_classifier(config):
        return recipe, None  # what a new classifier is for all labels tell together
    try:
        problem = problem_of(config, splits)
    except InputError as error:
        mistakes.add(("model",), f"{folder or recipe.model}: {error}", code=error.code)
        return recipe, None
    for name, found in label_mistakes(config, splits, problem):
        mistakes.note(("data", name), found)
    if touches(bad, "score.quality") or not (whole or config.get("problem_type")):
        return recipe, problem if whole else None
    for at, found in metric_mistakes(recipe.score.quality, problem):
        mistakes.note(("score", "quality", at), found)
    metrics = recipe.score.quality or METRICS_OF[problem]
    if not recipe.score.quality:
        for gate, found in gate_mistakes(recipe.gates, metrics, problem):
            mistakes.note(("gates", gate), found)
    score = recipe.score.model_copy(update={"quality": metrics})
    return recipe.model_copy(update={"score": score}), problem if whole else None


def settle_labels(
    recipe: Recipe, file: Path, data: Mapping[str, Split], problem: ProblemType | None
) -> tuple[tuple[ProblemType, list[str]], tuple[str, ...]]:
    """Find out what kind of classification this is, check all labels, and choose the metrics.

    Args:
        recipe: the recipe.
        file: the model's config.json.
        data: the rows of every split.
        problem: where the plan could tell it.

    Returns:
        The problem type with the names of the outputs that a new classifier gets, and the metrics.

    Raises:
        InputError: labels, metrics or gates do not fit the model; every mistake, one per line.
    """
    config, _ = (read_config_file if isinstance(recipe.model, str) else read_outline)(file)
    problem = problem or problem_of(config, data)
    found = [one for _, one in label_mistakes(config, data, problem)]
    quality = metric_mistakes(recipe.score.quality, problem)
    found += [one.prefixed("score.quality: ") for _, one in quality]
    metrics = recipe.score.quality or METRICS_OF[problem]
    found += [one.prefixed("gates: ") for _, one in gate_mistakes(recipe.gates, metrics, problem)]
    if found:
        raise together(found)
    return (problem, new_names(data, problem)), metrics
