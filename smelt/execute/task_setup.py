"""Resolve what the task adds to the original model: class labels, pooling, text rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.data import CLASSIFICATION_TASKS, SENTENCE_SIMILARITY, Split
from smelt.core.labels import ProblemType
from smelt.core.messages import Message
from smelt.planning.embedder_checks import embedder_metrics, resolve_pooling
from smelt.planning.label_checks import resolve_labels
from smelt.planning.text_rules import resolve_text_rules
from smelt.planning.untrained_checks import config_file
from smelt.runtime.text.sentence_files import SentenceRules
from smelt.runtime.text.text_preprocessing import TextRules

if TYPE_CHECKING:
    from smelt.planning.plan import Plan

ClassLabels = tuple[ProblemType, list[str]]


@dataclass(frozen=True)
class TaskSetup:
    """Task-specific settings of the original model.

    labels: problem type of a classifier, and the class names if it gets a new classifier. sentences: pooling
    of a sentence embedder. text_rules: prefix and languages of texts.
    """

    text_rules: TextRules
    labels: ClassLabels | None = None
    sentences: SentenceRules | None = None

    @property
    def key_parts(self) -> dict[str, Any]:
        """The parts that enter the artifact's key."""
        made = {} if self.sentences is None else {"sentences": self.sentences.model_dump()}
        return {"text": self.text_rules.cache_key(), **made}


@dataclass(frozen=True)
class ResolvedTask:
    """The model folder, task setup, metrics and warnings of a run, once model and data are available."""

    folder: Path
    task_setup: TaskSetup
    metrics: Sequence[str]
    warnings: Sequence[Message] = ()


def resolve_task(plan: Plan, data: Mapping[str, Split], metrics: Sequence[str]) -> ResolvedTask:
    """Return the task setup for the model of `plan`; a hub id is downloaded now.

    Args:
        plan: plan of the run.
        data: all splits.
        metrics: metrics of the recipe; replaced by the task's defaults if empty.

    Raises:
        InputError: model, labels, scores and metrics do not fit each other.
    """
    recipe, model = plan.recipe, plan.recipe.model
    ready = isinstance(model, str)
    folder = plan.model_folder if isinstance(model, str) else recipe.base / model.config
    file = folder / "config.json" if isinstance(model, str) else config_file(model, recipe.base)
    labels, sentences, doubts = None, None, list[Message]()
    if recipe.task in CLASSIFICATION_TASKS:
        labels, metrics = resolve_labels(recipe, file, data, plan.problem_type)
    elif recipe.task == SENTENCE_SIMILARITY:
        metrics = embedder_metrics(recipe, data)
        sentences, doubts = resolve_pooling(recipe, folder if ready else None)
    rules, _ = resolve_text_rules(recipe, folder)
    return ResolvedTask(folder, TaskSetup(rules, labels, sentences), metrics, doubts)
