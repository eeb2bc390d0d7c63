"""Check what the metrics of a recipe need: data, models, packages, and a user's own functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from smelt.core.errors import InputError, MissingDependencyError
from smelt.core.messages import Message, info
from smelt.data.splits import Split
from smelt.evaluate.metrics.registry import find_metric, is_custom_metric
from smelt.pipeline.recipe.recipe import ParsedRecipe
from smelt.pipeline.recipe.validation_errors import RecipeErrors

if TYPE_CHECKING:
    from smelt.pipeline.recipe.yaml_file import KeyPath


def check_metrics(recipe: ParsedRecipe, splits: Mapping[str, Split], errors: RecipeErrors) -> None:
    """Check what the recipe's metrics need: a tokenizer that fits, choices, data, a model, a function."""
    from smelt.evaluate.custom_metric import load_custom_metric

    scored = {name: splits[name] for name in ("test", "validation") if name in splits}
    for at, metric in enumerate(recipe.score.quality):
        path: KeyPath = ("score", "quality", at)
        try:
            if is_custom_metric(metric):
                load_custom_metric(metric, recipe.base)
            else:
                find_metric(metric).check(recipe.metric_settings.get(metric, {}), recipe.base, scored)
        except (InputError, MissingDependencyError) as error:
            setting = () if error.setting is None else (metric, error.setting)
            errors.add((*path, *setting), str(error), code=error.code)


def custom_metric_notes(recipe: ParsedRecipe) -> Iterator[Message]:
    """Yield that a plan has imported a user's custom metrics, which runs their code, and from where."""
    from smelt.evaluate.custom_metric import load_custom_metric

    for metric in filter(is_custom_metric, recipe.score.quality):
        source = load_custom_metric(metric, recipe.base).file
        yield info(
            "custom-metric-imported",
            f"score.quality: imports '{metric}' from {source or 'a module without a file'}, which runs its"
            " code, also in this check.",
        )
