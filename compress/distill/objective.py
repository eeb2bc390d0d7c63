"""The loss of a distillation: what the student gives and computes on its way, against the teacher's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.distill.inner import Inner
from smelt.compress.distill.sentences import vectors_terms
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.train.classifier_losses import training_loss
from smelt.compress.train.loop import logits_of
from smelt.compress.train.terms import Objective, Term
from smelt.runtime.models.sentence_model import is_sentence_model


def inner_of(student: Any, teacher: Any, settings: DistillSettings, seed: int) -> Inner | None:
    """Return what compares the two models' insides, None where the loss does not ask for it.

    Raises:
        InputError: what is asked for, the two do not have in common.
    """
    if not settings.losses.of_inner():
        return None
    return Inner(student, teacher, settings.losses, settings.layer_map, settings.relation_heads, seed)


def distill_objective(teacher: Any, settings: DistillSettings, inner: Inner | None = None) -> Objective:
    """Return the weighted losses of `settings` with `teacher` (eval mode) run on the same batch.

    Args:
        teacher: has no gradient.
        settings: the weights, T, label smoothing.
        inner: reads both models while it is entered (`Inner.around`).
    """
    weights = settings.losses
    embeds = is_sentence_model(teacher)
    reverse = weights.reverse_logits or 0.0
    parts = weights.of_vectors()
    compares = bool(parts["embedding"] or parts["similarity"] if embeds else weights.logits or reverse)

    def outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """Run both models; the teacher only where something of it is wanted."""
        from smelt.compress.train.sentence_losses import vectors_of

        run = vectors_of if embeds else logits_of
        if inner is not None:
            inner.clear()
        found, wanted = run(model, batch), None
        if compares or inner is not None:
            with torch.no_grad():
                wanted = run(teacher.to(batch["labels"].device), batch)
        return found, wanted if compares else None

    def objective(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Term]:
        found, wanted = outputs(model, batch)
        terms: dict[str, Term] = {}
        if embeds:
            terms |= vectors_terms(found, wanted, batch["labels"], parts)
        elif weights.logits or weights.labels or reverse:
            told: dict[str, Tensor] = {}
            config: Any = getattr(model, "module", model).config
            loss = training_loss(
                config, found, batch["labels"], wanted, temperature=settings.temperature,
                logits_weight=weights.logits, labels_weight=weights.labels, reverse_weight=reverse,
                smoothing=settings.label_smoothing if model.training else 0.0, told=told,
            )  # fmt: skip
            terms["outputs"] = Term(loss, told=told)
        if inner is not None:
            terms |= inner.terms(batch)
        return terms

    return objective
