"""Check pooling and metrics of a sentence embedder before a run.

Pooling and normalization come from the model's folder, in the layout of sentence-transformers; the recipe's
key `embedding` overrides them. The metrics depend on whether the test samples have scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from smelt.core.data import SENTENCE_SIMILARITY, Split
from smelt.core.errors import InputError, combined_error
from smelt.core.messages import Message, error_message, warning
from smelt.recipe.mistakes import Mistakes, has_mistake
from smelt.recipe.problem_type import AGREEMENT_METRIC, CORRELATION_METRICS, EMBEDDING_METRICS
from smelt.recipe.recipe import ParsedRecipe
from smelt.runtime.text.sentence_files import MODULES_FILE, POOLINGS, SentenceRules, read_sentence_rules

_POOLING_TEXTS = {
    "mean": "mean over the tokens",
    "cls": "the first token",
    "max": "maximum over the tokens",
}


def resolve_pooling(recipe: ParsedRecipe, folder: Path | None) -> tuple[SentenceRules, list[Message]]:
    """Return the pooling rules for the model in `folder`, and warnings about them.

    folder: None for a model that is created from its config.

    Raises:
        InputError: the folder's files are damaged, or use a feature that smelt does not support.
    """
    own = None if folder is None else read_sentence_rules(folder)
    said = recipe.embedding.model_dump(exclude_none=True)
    rules = (own or SentenceRules()).model_copy(update=said)
    doubts: list[Message] = []
    if own is None and "pooling" not in said:
        doubts.append(
            warning(
                "pooling-assumed",
                f"The model has no {MODULES_FILE}, which defines its pooling. Using:"
                f" {_POOLING_TEXTS[rules.pooling]}."
                f" Set embedding: {{pooling: ...}} to one of {', '.join(POOLINGS)}.",
                setting="embedding.pooling",
            )
        )
    for name in ("pooling", "normalize") if own is not None else ():
        if name in said and said[name] != getattr(own, name):
            doubts.append(
                warning(
                    "embedding-differs",
                    f"embedding: {name} is {said[name]}, but the model was trained with {getattr(own, name)}"
                    f" ({MODULES_FILE}), so its vectors will differ. Remove the setting to use the"
                    " model's value.",
                    setting=f"embedding.{name}",
                )
            )
    return rules, doubts


def pooling_text(rules: SentenceRules) -> str:
    """Return the description of `rules` in `smelt plan`."""
    length = "" if rules.max_length is None else f", texts of at most {rules.max_length:,} tokens"
    return (
        f"{_POOLING_TEXTS[rules.pooling]}{', normalized' if rules.normalize else ', not normalized'}{length}"
    )


def check_embedder(
    recipe: ParsedRecipe,
    folder: Path | None,
    splits: Mapping[str, Split],
    mistakes: Mistakes,
    bad: set[str],
    warnings: list[Message],
) -> ParsedRecipe:
    """Check an embedder's folder and metrics, as far as model and data are available.

    Args:
        recipe: the parsed recipe.
        folder: the model's folder; None if it is not downloaded or created yet.
        splits: the splits that were read.
        mistakes: receives the mistakes.
        bad: dotted paths of parts that are known to be invalid.
        warnings: receives the warnings.

    Returns:
        The recipe, with default metrics if it names none.
    """
    if recipe.task != SENTENCE_SIMILARITY or has_mistake(bad, "task"):
        return recipe
    if folder is not None and not has_mistake(bad, "model", "embedding"):
        try:
            warnings += resolve_pooling(recipe, folder)[1]
        except InputError as error:
            mistakes.add_error(("model",), error)
    if "test" not in splits or has_mistake(bad, "score.quality"):
        return recipe
    for where, found in _embedder_mistakes(recipe, splits):
        mistakes.add_message(where, found)
    score = recipe.score.model_copy(update={"quality": _metrics_for(recipe, splits["test"])})
    return recipe.model_copy(update={"score": score})


def embedder_metrics(recipe: ParsedRecipe, data: Mapping[str, Split]) -> tuple[str, ...]:
    """Return the metrics of a run on `data`.

    Raises:
        InputError: metrics or gates need scores that the test samples do not have; lists every mistake.
    """
    found = [
        one.with_prefix(f"{'.'.join(map(str, where))}: ") for where, one in _embedder_mistakes(recipe, data)
    ]
    if found:
        raise combined_error(found)
    return _metrics_for(recipe, data["test"])


def _metrics_for(recipe: ParsedRecipe, test: Split) -> tuple[str, ...]:
    fitting = EMBEDDING_METRICS if test.has_labels else (AGREEMENT_METRIC,)
    return recipe.score.quality or fitting


def _embedder_mistakes(
    recipe: ParsedRecipe, data: Mapping[str, Split]
) -> list[tuple[tuple[str | int, ...], Message]]:
    """Return (path in the recipe, mistake) for metrics and gates that need scores the samples do not have."""
    scored = dict.fromkeys(["test", recipe.judged_on or "test"])
    lacking = next((name for name in scored if name in data and not data[name].has_labels), None)
    if lacking is None:
        return []
    places: list[tuple[tuple[str | int, ...], str]] = [
        (("score", "quality", at), metric) for at, metric in enumerate(recipe.score.quality)
    ]
    places += [(("gates", metric), metric) for metric in recipe.gates]
    why = f"needs scored pairs, but the {lacking} samples have no scores (column 'label'). Add them, or use"
    return [
        (where, error_message("missing-scores", f"'{metric}' {why} {AGREEMENT_METRIC}."))
        for where, metric in places
        if metric in CORRELATION_METRICS
    ]
