"""Training on unlabelled samples: the teacher's outputs are the only targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smelt.compress.distill.settings import DistillSettings
from smelt.core.data import SENTENCE_SIMILARITY, Example, Label, Split, Task
from smelt.core.labels import MULTI_LABEL, REGRESSION, problem_type
from smelt.core.messages import Message, error_message
from smelt.core.stage import Context, Need
from smelt.core.unlabelled import UNLABELLED, UNLABELLED_TASKS


def needed_splits(settings: DistillSettings) -> frozenset[Need]:
    """Return the data splits that the training needs."""
    found: dict[str, frozenset[Need]] = {
        "labelled": frozenset({"train"}),
        "unlabelled": frozenset({"unlabelled"}),
        "both": frozenset({"train", "unlabelled"}),
    }
    return found[settings.train_on]


def check_unlabelled(settings: DistillSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
    """Return the mistakes, each with its setting, of losses that need labels on unlabelled samples."""
    if settings.train_on == "labelled":
        return []
    if task not in UNLABELLED_TASKS:
        tasks = " and ".join(sorted(UNLABELLED_TASKS))
        text = f"unlabelled samples are supported for {tasks}, not for {task}; remove train_on."
        return [error_message("does-not-fit-task", text, setting="train_on")]
    found = []
    origin = data[UNLABELLED].origin if UNLABELLED in data else f"data: {UNLABELLED}"
    for number, training in enumerate(settings.phase_settings()):
        place = "losses" if settings.phases is None else f"phases.{number}.losses"
        part = "cosent" if task == SENTENCE_SIMILARITY else "labels"
        weight = (
            training.losses.vector_weights()["cosent"]
            if task == SENTENCE_SIMILARITY
            else training.losses.labels
        )
        if weight:
            teaches = task == SENTENCE_SIMILARITY or training.losses.uses_teacher()
            mend = f"losses: {{{part}: 0}}, which keeps" if teaches else "losses: {logits: 1.0}, which is"
            found.append(
                error_message(
                    "missing-scores" if task == SENTENCE_SIMILARITY else "missing-labels",
                    f"the weight of this loss is {weight:g}, but the samples of {origin} have no"
                    f" {part}. Set {mend} the loss on the teacher's outputs.",
                    setting=f"{place}.{part}",
                )
            )
    return found


def with_training_samples(settings: DistillSettings, config: Any, ctx: Context) -> Context:
    """Return `ctx` with the training samples that the settings select.

    Each sample without a label gets a dummy label that no loss uses. If pairs and single texts are combined
    for a sentence embedder, the pairs are split into single texts.
    """
    if settings.train_on == "labelled":
        return ctx
    names = ("train", UNLABELLED) if settings.train_on == "both" else (UNLABELLED,)
    splits = [ctx.data[name] for name in names]
    examples = [example for split in splits for example in split.examples]
    if ctx.task == SENTENCE_SIMILARITY:
        if len({example.text_pair is None for example in examples}) == 2:
            examples = [single for example in examples for single in _split_pair(example)]
        examples = [replace(example, label=None) for example in examples]
    else:
        unread = _placeholder_label(config)
        examples = [replace(example, label=unread) for example in examples]
    rows = Split(" and ".join(split.origin for split in splits), tuple(examples))
    ctx.details["rows"] = {split.origin: len(split) for split in splits}
    return replace(ctx, data={**ctx.data, "train": rows})


def _placeholder_label(config: Any) -> Label:
    problem = problem_type(config.to_dict())
    if problem == REGRESSION:
        return 0.0
    return () if problem == MULTI_LABEL else str(config.id2label[0])


def _split_pair(example: Example) -> list[Example]:
    """Return the texts of a pair as separate examples."""
    texts = [example.text] + ([] if example.text_pair is None else [example.text_pair])
    return [replace(example, text=text, text_pair=None) for text in texts]
