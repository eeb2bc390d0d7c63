"""Check what the metrics of a recipe need: data, models, packages, and a user's own functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from smelt.core.errors import InputError, MissingDependencyError
from smelt.core.messages import Message, error_message, info
from smelt.data.bleu_tokenizer import bleu_tokenizer
from smelt.data.splits import Split
from smelt.evaluate.metrics import CHOICE_METRICS, is_custom_metric
from smelt.pipeline.plan.check_context import CheckContext, skip_if_invalid
from smelt.pipeline.recipe.recipe import ParsedRecipe
from smelt.pipeline.recipe.validation_errors import Finding

if TYPE_CHECKING:
    from smelt.pipeline.recipe.yaml_file import KeyPath


@skip_if_invalid("score.quality", "task")
def check_metrics(context: CheckContext) -> Iterator[Finding]:
    """Check what the recipe's metrics need: a tokenizer that fits, choices, data, a model, a function."""
    from smelt.evaluate.custom_metric import load_custom_metric
    from smelt.evaluate.text_similarity import check_encoder, require_wordnet

    recipe, splits = context.recipe, context.splits
    for at, metric in enumerate(recipe.score.quality):
        path: KeyPath = ("score", "quality", at)
        try:
            if is_custom_metric(metric):
                load_custom_metric(metric, recipe.base)
            elif metric == "meteor":
                require_wordnet()
            elif metric == "bertscore" and metric in recipe.metric_settings:
                check_encoder(recipe.metric_settings[metric], recipe.base)
            elif metric in CHOICE_METRICS and "test" in splits:
                _require_choices(metric, splits["test"])
        except (InputError, MissingDependencyError) as error:
            yield path, error_message(error.code, str(error))
        if metric == "bleu":
            yield from _check_bleu_tokenizer(recipe, splits, (*path, "bleu", "tokenize"))


def _require_choices(metric: str, split: Split) -> None:
    if not split.has_choices:
        raise InputError(
            f"'{metric}' scores choices, and the samples of {split.origin} have none. Add a list of texts"
            " 'choices' and the right one as 'answer', or remove the metric.",
            code="missing-choices",
        )


def _check_bleu_tokenizer(
    recipe: ParsedRecipe, splits: Mapping[str, Split], path: KeyPath
) -> Iterator[Finding]:
    """Check that the tokenizer set for BLEU can split the references."""
    for name in ("test", "validation"):
        if recipe.tokenize is None or name not in splits:
            continue
        try:
            bleu_tokenizer((t for e in splits[name].examples for t in e.references), recipe.tokenize)
        except InputError as error:
            yield path, error_message(error.code, f"data.{name}: {error}")
            return


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
