"""Check what the metrics of a recipe need: data, models, packages, and a user's own functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from smelt.core.errors import InputError, MissingDependencyError
from smelt.core.messages import Message, error_message, info
from smelt.evaluate.metrics.registry import find_metric, is_custom_metric
from smelt.pipeline.plan.check_context import CheckContext, skip_if_invalid
from smelt.pipeline.recipe.recipe import ParsedRecipe
from smelt.pipeline.recipe.validation_errors import Finding

if TYPE_CHECKING:
    from smelt.pipeline.recipe.yaml_file import KeyPath


@skip_if_invalid("score.quality", "task")
def check_metrics(context: CheckContext) -> Iterator[Finding]:
    """Check what the recipe's metrics need: a tokenizer that fits, choices, data, a model, a function."""
    from smelt.evaluate.custom_metric import load_custom_metric

    recipe = context.recipe
    scored = {name: context.splits[name] for name in ("test", "validation") if name in context.splits}
    for index, metric in enumerate(recipe.score.quality):
        path: KeyPath = ("score", "quality", index)
        try:
            if is_custom_metric(metric):
                load_custom_metric(metric, recipe.base)
            else:
                find_metric(metric).check(recipe.metric_settings.get(metric, {}), recipe.base, scored)
        except (InputError, MissingDependencyError) as error:
            setting = () if error.setting is None else (metric, error.setting)
            yield (*path, *setting), error_message(error.code, str(error))


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
