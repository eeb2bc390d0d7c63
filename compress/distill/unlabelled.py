"""Learning from texts without labels: what the teacher says of them is all that is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smelt.compress.distill.settings import DistillSettings
from smelt.core.data import SIMILARITY, Example, Label, Split, Task
from smelt.core.labels import MULTI, REGRESSION, problem_type
from smelt.core.messages import Message, mistake
from smelt.core.stage import Context, Need
from smelt.core.unlabelled import UNLABELLED, WITHOUT_LABELS


def needs_of_rows(settings: DistillSettings) -> frozenset[Need]:
    """Return which rows it learns on."""
    found: dict[str, frozenset[Need]] = {
        "labelled": frozenset({"train"}),
        "unlabelled": frozenset({"unlabelled"}),
        "both": frozenset({"train", "unlabelled"}),
    }
    return found[settings.train_on]


def check_unlabelled(settings: DistillSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
    """Return what is wrong, with its setting, where rows without labels shall teach what labels alone can."""
    if settings.train_on == "labelled":
        return []
    if task not in WITHOUT_LABELS:
        tasks = " and ".join(sorted(WITHOUT_LABELS))
        text = f"texts without labels are for {tasks}, not for {task}; leave it out."
        return [mistake("does-not-fit-task", text, setting="train_on")]
    found = []
    origin = data[UNLABELLED].origin if UNLABELLED in data else f"data: {UNLABELLED}"
    for number, training in enumerate(settings.trainings()):
        place = "losses" if settings.phases is None else f"phases.{number}.losses"
        part = "cosent" if task == SIMILARITY else "labels"
        weight = training.losses.of_vectors()["cosent"] if task == SIMILARITY else training.losses.labels
        if weight:
            teaches = task == SIMILARITY or training.losses.from_teacher()
            mend = f"losses: {{{part}: 0}}, which leaves" if teaches else "losses: {logits: 1.0}, which is"
            found.append(
                mistake(
                    "missing-scores" if task == SIMILARITY else "missing-labels",
                    f"its weight is {weight:g}, and the rows of {origin} have no {part}; write {mend} what"
                    " the teacher says.",
                    setting=f"{place}.{part}",
                )
            )
    return found


def with_rows(settings: DistillSettings, config: Any, ctx: Context) -> Context:
    """Return `ctx`, whose training rows are those that the settings ask for.

    Each text that has no label gets one that no loss looks at. Where pairs of sentence embedders meet single
    texts, all are single ones.
    """
    if settings.train_on == "labelled":
        return ctx
    names = ("train", UNLABELLED) if settings.train_on == "both" else (UNLABELLED,)
    splits = [ctx.data[name] for name in names]
    examples = [example for split in splits for example in split.examples]
    if ctx.task == SIMILARITY:
        if len({example.text_pair is None for example in examples}) == 2:
            examples = [single for example in examples for single in _apart(example)]
        examples = [replace(example, label=None) for example in examples]
    else:
        unread = _any_label(config)
        examples = [replace(example, label=unread) for example in examples]
    rows = Split(" and ".join(split.origin for split in splits), tuple(examples))
    ctx.details["rows"] = {split.origin: len(split) for split in splits}
    return replace(ctx, data={**ctx.data, "train": rows})


def _any_label(config: Any) -> Label:
    problem = problem_type(config.to_dict())
    if problem == REGRESSION:
        return 0.0
    return () if problem == MULTI else str(config.id2label[0])


def _apart(example: Example) -> list[Example]:
    """Return the texts of a pair as examples of their own."""
    texts = [example.text] + ([] if example.text_pair is None else [example.text_pair])
    return [replace(example, text=text, text_pair=None) for text in texts]
