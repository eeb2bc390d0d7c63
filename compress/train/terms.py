"""What a training minimises: a mean over items, or several such means with names.

The gradient of an update is that of one batch of all its rows: a mean over all items, whichever batches
they came in. Parts of a loss are means over different items (labels of the decoder, tokens of the encoder),
so each says over which, and counts by its share of those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor, nn

from smelt.compress.train.losses.of_tokens import IGNORE

# labels: what `items_in` counts. inputs: tokens that go in, without padding (an encoder's, a classifier's).
Over = Literal["labels", "inputs"]
OVER: tuple[Over, ...] = ("labels", "inputs")
LOSS = "loss"  # the name of a loss that has no parts


@dataclass(frozen=True)
class Term:
    """One summand of a loss.

    value: float32 scalar with a gradient: a mean over the batch's items, times its weight. over: which items.
    told: what it is made of, where that is more than one thing; the values, which add up to `value`.
    """

    value: Tensor
    over: Over = "labels"
    told: Mapping[str, Tensor] = field(default_factory=dict)


Terms: TypeAlias = Mapping[str, Term]
# From a model and a batch to the mean loss over its labels (a float32 scalar), or to several such means.
Objective: TypeAlias = Callable[[nn.Module, Mapping[str, Tensor]], Tensor | Terms]


def terms_of(found: Tensor | Terms) -> Terms:
    """Return what an objective gave as terms by name."""
    return {LOSS: Term(found)} if isinstance(found, Tensor) else found


def total_of(found: Tensor | Terms) -> Tensor:
    """Return the sum of what an objective gave, a scalar."""
    terms = list(terms_of(found).values())
    total = terms[0].value
    for term in terms[1:]:
        total = total + term.value
    return total


def values_of(terms: Terms) -> dict[str, tuple[float, Over]]:
    """Return the value of each named part, and over which items it is a mean."""
    found: dict[str, tuple[float, Over]] = {}
    for name, term in terms.items():
        for part, value in (term.told or {name: term.value}).items():
            found[part] = float(value.detach()), term.over
    return found


def items_in(labels: Tensor) -> int:
    """Return over how many items the objective of a batch with these labels is a mean.

    -100 stands for padding among classes and tokens only; among numbers it is one.
    """
    return labels.numel() if labels.is_floating_point() else int((labels != IGNORE).sum())


def counts_of(batch: Mapping[str, Tensor]) -> dict[Over, int]:
    """Return how many items of each kind a batch has; inputs that are no tokens count as their labels do."""
    labels, mask = items_in(batch["labels"]), batch.get("attention_mask")
    return {"labels": labels, "inputs": labels if mask is None else int(mask.sum())}
