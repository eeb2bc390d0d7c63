"""Check labels and metrics of a classifier before the first step of a run.

The problem type (one label, several labels, or a number) comes from the model's config or, if not set there,
from the labels; the metrics depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from smelt.core.data import CLASSIFICATION_TASKS, Split
from smelt.core.errors import InputError, combined_error
from smelt.core.labels import ProblemType
from smelt.inspect.model_folder import read_config, read_config_file
from smelt.planning.untrained_checks import config_file, read_untrained_config
from smelt.recipe.mistakes import Mistakes, has_mistake
from smelt.recipe.model_and_data import UntrainedModel
from smelt.recipe.problem_type import (
    METRICS_BY_PROBLEM,
    gate_mistakes,
    has_classifier,
    label_mistakes,
    metric_mistakes,
    new_class_names,
    resolve_problem_type,
)
from smelt.recipe.recipe import ParsedRecipe


def check_classifier(
    recipe: ParsedRecipe, folder: Path | None, splits: Mapping[str, Split], mistakes: Mistakes, bad: set[str]
) -> tuple[ParsedRecipe, ProblemType | None]:
    """Check labels and metrics of a classifier, as far as model and data are available.

    Args:
        recipe: the parsed recipe.
        folder: the model's folder; None if it is not downloaded or created yet.
        splits: the splits that were read.
        mistakes: receives the mistakes.
        bad: dotted paths of parts that are known to be invalid.

    Returns:
        The recipe, with default metrics if it names none; the problem type, None if it is not known before
        the run.
    """
    untrained = recipe.model if isinstance(recipe.model, UntrainedModel) else None
    here = folder is not None or untrained is not None
    if recipe.task not in CLASSIFICATION_TASKS or has_mistake(bad, "task", "model") or not here:
        return recipe, None
    if untrained is not None:
        config, problems = read_untrained_config(config_file(untrained, recipe.base))
    else:
        assert folder is not None
        config, problems = read_config(folder)
    if problems:
        return recipe, None
    whole = set(splits) == set(recipe.data.split_sources())
    if not whole and not has_classifier(config):
        return recipe, None  # the problem type of a new classifier depends on all labels
    try:
        problem = resolve_problem_type(config, splits)
    except InputError as error:
        mistakes.add(("model",), f"{folder or recipe.model}: {error}", code=error.code)
        return recipe, None
    for name, found in label_mistakes(config, splits, problem):
        mistakes.add_message(("data", name), found)
    if has_mistake(bad, "score.quality") or not (whole or config.get("problem_type")):
        return recipe, problem if whole else None
    for at, found in metric_mistakes(recipe.score.quality, problem):
        mistakes.add_message(("score", "quality", at), found)
    metrics = recipe.score.quality or METRICS_BY_PROBLEM[problem]
    if not recipe.score.quality:
        for gate, found in gate_mistakes(recipe.gates, metrics, problem):
            mistakes.add_message(("gates", gate), found)
    score = recipe.score.model_copy(update={"quality": metrics})
    return recipe.model_copy(update={"score": score}), problem if whole else None


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
        InputError: labels, metrics or gates do not fit the model; the message lists every mistake.
    """
    config, _ = (read_config_file if isinstance(recipe.model, str) else read_untrained_config)(file)
    problem = problem or resolve_problem_type(config, data)
    found = [one for _, one in label_mistakes(config, data, problem)]
    quality = metric_mistakes(recipe.score.quality, problem)
    found += [one.with_prefix("score.quality: ") for _, one in quality]
    metrics = recipe.score.quality or METRICS_BY_PROBLEM[problem]
    found += [one.with_prefix("gates: ") for _, one in gate_mistakes(recipe.gates, metrics, problem)]
    if found:
        raise combined_error(found)
    return (problem, new_class_names(data, problem)), metrics
