"""What the task adds to a run's untouched model: a classifier's labels, how vectors are made, text rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.data import CLASSIFICATION, SIMILARITY, Split
from smelt.core.labels import ProblemType
from smelt.core.messages import Message
from smelt.planning.labels import settle_labels
from smelt.planning.sentences import sentence_rules, settle_sentences
from smelt.planning.text_rules import text_rules
from smelt.planning.untrained import config_file
from smelt.runtime.text.rules import TextRules
from smelt.runtime.text.sentence_files import SentenceRules

if TYPE_CHECKING:
    from smelt.planning.plan import Plan

Labels = tuple[ProblemType, list[str]]


@dataclass(frozen=True)
class Head:
    """What comes behind the encoder of the untouched model, and what is done to its texts.

    labels: of a classifier its problem type, and the names of the outputs that it gets if it has none.
    sentences: how a sentence embedder makes vectors. rules: for the texts.
    """

    rules: TextRules
    labels: Labels | None = None
    sentences: SentenceRules | None = None

    @property
    def key(self) -> dict[str, Any]:
        """What a key is made of."""
        made = {} if self.sentences is None else {"sentences": self.sentences.model_dump()}
        return {"text": self.rules.key(), **made}


@dataclass(frozen=True)
class Settled:
    """What is known of a run once its model and data are at hand. doubts: what a person should know."""

    folder: Path
    head: Head
    metrics: Sequence[str]
    doubts: Sequence[Message] = ()


def settle_head(plan: Plan, data: Mapping[str, Split], metrics: Sequence[str]) -> Settled:
    """Find out what the task adds to the model of `plan`; an id on the hub is downloaded now.

    Args:
        plan: the run's.
        data: the rows of every split.
        metrics: what the recipe scores; the task fills them in where it names none.

    Raises:
        InputError: model, labels, scores and metrics do not fit each other.
    """
    recipe, model = plan.recipe, plan.recipe.model
    ready = isinstance(model, str)
    folder = plan.model_folder if isinstance(model, str) else recipe.base / model.config
    file = folder / "config.json" if isinstance(model, str) else config_file(model, recipe.base)
    labels, sentences, doubts = None, None, list[Message]()
    if recipe.task in CLASSIFICATION:
        labels, metrics = settle_labels(recipe, file, data, plan.problem)
    elif recipe.task == SIMILARITY:
        metrics = settle_sentences(recipe, data)
        sentences, doubts = sentence_rules(recipe, folder if ready else None)
    rules, _ = text_rules(recipe, folder)
    return Settled(folder, Head(rules, labels, sentences), metrics, doubts)
