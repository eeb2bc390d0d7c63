"""What can be known of a sentence embedder before the first step of a run: how it makes vectors, its metrics.

How texts become vectors says the model's folder, as sentence-transformers writes it, and the recipe's key
`embedding`, which wins. What is scored depends on whether the test rows have scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from smelt.core.data import SIMILARITY, Split
from smelt.core.errors import InputError, together
from smelt.core.messages import Message, mistake, warning
from smelt.recipe.errors import Mistakes, touches
from smelt.recipe.problem import AGREEMENT, SCORE_METRICS, VECTOR_METRICS
from smelt.recipe.recipe import Recipe
from smelt.runtime.text.sentence_files import MODULES, POOLINGS, SentenceRules, read_sentence_rules

_WORDS = {"mean": "the mean of the tokens", "cls": "the first token", "max": "the largest of all tokens"}


def sentence_rules(recipe: Recipe, folder: Path | None) -> tuple[SentenceRules, list[Message]]:
    """Return how the model in `folder` is to make vectors, and what a person should know of that.

    folder: None for a model that is made from its config.

    Raises:
        InputError: the folder's files are damaged, or ask for what smelt does not do.
    """
    own = None if folder is None else read_sentence_rules(folder)
    said = recipe.embedding.model_dump(exclude_none=True)
    rules = (own or SentenceRules()).model_copy(update=said)
    doubts: list[Message] = []
    if own is None and "pooling" not in said:
        doubts.append(
            warning(
                "pooling-assumed",
                f"The model has no {MODULES}, which defines its pooling; {_WORDS[rules.pooling]} is used."
                f" Choose with embedding: {{pooling: ...}}: {', '.join(POOLINGS)}.",
                setting="embedding.pooling",
            )
        )
    for name in ("pooling", "normalize") if own is not None else ():
        if name in said and said[name] != getattr(own, name):
            doubts.append(
                warning(
                    "embedding-differs",
                    f"embedding: {name} is {said[name]}, but the model was trained with {getattr(own, name)}"
                    f" ({MODULES}): its vectors will differ from those it was trained for.",
                    setting=f"embedding.{name}",
                )
            )
    return rules, doubts


def described(rules: SentenceRules) -> str:
    """Return what `smelt plan` says of `rules`."""
    length = "" if rules.max_length is None else f", texts of at most {rules.max_length:,} tokens"
    return f"{_WORDS[rules.pooling]}{', normalized' if rules.normalize else ', not normalized'}{length}"


def check_sentences(
    recipe: Recipe,
    folder: Path | None,
    splits: Mapping[str, Split],
    mistakes: Mistakes,
    bad: set[str],
    warnings: list[Message],
) -> Recipe:
    """Check an embedder's folder and metrics as far as model and data are at hand.

    Args:
        recipe: as it was read.
        folder: the model's, or None where it is still to be fetched or made.
        splits: the rows that were read already.
        mistakes: gets what is wrong.
        bad: what is wrong already, as dotted paths, and of which nothing more is said.
        warnings: gets what a person should know.

    Returns:
        The recipe, its metrics filled in where it names none.
    """
    if recipe.task != SIMILARITY or touches(bad, "task"):
        return recipe
    if folder is not None and not touches(bad, "model", "embedding"):
        try:
            warnings += sentence_rules(recipe, folder)[1]
        except InputError as error:
            mistakes.refuse(("model",), error)
    if "test" not in splits or touches(bad, "score.quality"):
        return recipe
    for where, found in _mistakes(recipe, splits):
        mistakes.note(where, found)
    score = recipe.score.model_copy(update={"quality": _metrics(recipe, splits["test"])})
    return recipe.model_copy(update={"score": score})


def settle_sentences(recipe: Recipe, data: Mapping[str, Split]) -> tuple[str, ...]:
    """Return the metrics of a run over `data`.

    Raises:
        InputError: metrics or gates need scores that the test rows do not have; every mistake, one per line.
    """
    found = [one.prefixed(f"{'.'.join(map(str, where))}: ") for where, one in _mistakes(recipe, data)]
    if found:
        raise together(found)
    return _metrics(recipe, data["test"])


def _metrics(recipe: Recipe, test: Split) -> tuple[str, ...]:
    fitting = VECTOR_METRICS if test.labelled else (AGREEMENT,)
    return recipe.score.quality or fitting


def _mistakes(recipe: Recipe, data: Mapping[str, Split]) -> list[tuple[tuple[str | int, ...], Message]]:
    """Return (place in the recipe, what is wrong) of what asks for scores that the rows do not have."""
    scored = dict.fromkeys(["test", recipe.judged_on or "test"])
    lacking = next((name for name in scored if name in data and not data[name].labelled), None)
    if lacking is None:
        return []
    places: list[tuple[tuple[str | int, ...], str]] = [
        (("score", "quality", at), metric) for at, metric in enumerate(recipe.score.quality)
    ]
    places += [(("gates", metric), metric) for metric in recipe.gates]
    why = f"needs scores of pairs, and the {lacking} rows have none (column 'label'); without them there is"
    return [
        (where, mistake("missing-scores", f"'{metric}' {why} {AGREEMENT}."))
        for where, metric in places
        if metric in SCORE_METRICS
    ]
