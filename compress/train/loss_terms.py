"""The objective of a training: a mean over items, or several named means.

The gradient of an update is that of one batch with all its samples: a mean over all items, independent of
their division into batches. Terms of a loss are means over different items (labels of the decoder, tokens of
the encoder), so each names its items, and is weighted by its share of those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor, nn

from smelt.compress.train.losses.tokens import IGNORE_INDEX

# labels: see `count_items`. inputs: input tokens without padding (of an encoder, of a classifier).
AveragedOver = Literal["labels", "inputs"]
AVERAGED_OVER: tuple[AveragedOver, ...] = ("labels", "inputs")
TOTAL_LOSS = "loss"  # the name of a loss with a single term


@dataclass(frozen=True)
class LossTerm:
    """One summand of a loss.

    value: float32 scalar with a gradient: a mean over the batch's items, times its weight. averaged_over: the
    items. components: named summands of `value`, if it has several.
    """

    value: Tensor
    averaged_over: AveragedOver = "labels"
    components: Mapping[str, Tensor] = field(default_factory=dict)


LossTerms: TypeAlias = Mapping[str, LossTerm]
# Maps a model and a batch to the mean loss over its labels (a float32 scalar), or to several terms.
Objective: TypeAlias = Callable[[nn.Module, Mapping[str, Tensor]], Tensor | LossTerms]


def as_loss_terms(found: Tensor | LossTerms) -> LossTerms:
    """Return the result of an objective as terms by name."""
    return {TOTAL_LOSS: LossTerm(found)} if isinstance(found, Tensor) else found


def total_loss(found: Tensor | LossTerms) -> Tensor:
    """Return the sum of the terms of an objective, a scalar."""
    terms = list(as_loss_terms(found).values())
    total = terms[0].value
    for term in terms[1:]:
        total = total + term.value
    return total


def term_values(terms: LossTerms) -> dict[str, tuple[float, AveragedOver]]:
    """Return the value of each named term, and the items of its mean."""
    found: dict[str, tuple[float, AveragedOver]] = {}
    for name, term in terms.items():
        for part, value in (term.components or {name: term.value}).items():
            found[part] = float(value.detach()), term.averaged_over
    return found


def count_items(labels: Tensor) -> int:
    """Return the number of items over which the objective of a batch with these labels is a mean.

    -100 marks padding among classes and tokens only; in regression it is a value.
    """
    return labels.numel() if labels.is_floating_point() else int((labels != IGNORE_INDEX).sum())


def count_batch_items(batch: Mapping[str, Tensor]) -> dict[AveragedOver, int]:
    """Return the number of items of each kind in a batch; inputs without tokens count like labels."""
    labels, mask = count_items(batch["labels"]), batch.get("attention_mask")
    return {"labels": labels, "inputs": labels if mask is None else int(mask.sum())}
