"""The loss of a distillation: what the student gives and computes on its way, against the teacher's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.distill.inner import Inner
from smelt.compress.distill.losses.buckets import Buckets, bucket_loss
from smelt.compress.distill.sentences import vectors_terms
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.teachers.kept import Ask, KeptTeacher
from smelt.compress.train.losses.of_classes import training_loss
from smelt.compress.train.losses.of_sentences import vectors_of
from smelt.compress.train.objective import logits_of
from smelt.compress.train.terms import Objective, Term
from smelt.core.stage import Context
from smelt.runtime.models.sentence_model import is_sentence_model


def inner_of(student: Any, teacher: Any, settings: DistillSettings, seed: int) -> Inner | None:
    """Return what compares the two models' insides, None where the loss does not ask for it.

    Raises:
        InputError: what is asked for, the two do not have in common.
    """
    if not settings.losses.of_inner():
        return None
    return Inner(student, teacher, settings.losses, settings.layer_map, settings.relation_heads, seed)


def kept_teacher(
    teacher: Any, who: Mapping[str, Any], student: Any, settings: DistillSettings, ctx: Context
) -> KeptTeacher:
    """Return what answers for `teacher` where its logits, or vectors, are kept (`cache_logits`).

    Args:
        teacher: in eval mode, on the CPU.
        who: says which one it is (`identity_of`).
        student: for the form of its inputs.
        settings: of the step.
        ctx: the store, device, threads.
    """
    config = student.config
    of_words = not is_sentence_model(student) and student.can_generate()
    words = (getattr(config, "decoder_vocab_size", None) or config.vocab_size) if of_words else None
    return KeptTeacher(teacher, config, _asked(teacher), settings, who, words, ctx)


def _asked(teacher: Any) -> Ask:
    """Return how a model such as `teacher` is run on a batch."""
    return vectors_of if is_sentence_model(teacher) else logits_of


def distill_objective(
    teacher: Any, settings: DistillSettings, inner: Inner | None = None, kept: KeptTeacher | None = None
) -> Objective:
    """Return the weighted losses of `settings` with `teacher` (eval mode) run on the same batch.

    Args:
        teacher: has no gradient.
        settings: the weights, T, label smoothing.
        inner: reads both models while it is entered (`Inner.around`).
        kept: answers for the teacher, which is not run then.
    """
    weights = settings.losses
    embeds = is_sentence_model(teacher)
    reverse = weights.reverse_kl or 0.0
    parts = weights.of_vectors()
    compares = bool(
        parts["sentence_embedding"] or parts["pairwise_similarity"] if embeds else weights.logits or reverse
    )
    ask = _asked(teacher)

    def outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """Run both models; the teacher only where something of it is wanted, and it is not kept."""
        if inner is not None:
            inner.clear()
        found, wanted = ask(model, batch), None
        if kept is not None:
            return found, kept.answers(batch) if compares else None
        if compares or inner is not None:
            with torch.no_grad():
                wanted = ask(teacher.to(batch["labels"].device), batch)
        return found, wanted if compares else None

    def objective(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Term]:
        found, wanted = outputs(model, batch)
        terms: dict[str, Term] = {}
        if embeds:
            terms |= vectors_terms(found, wanted, batch["labels"], parts)
        elif weights.logits or weights.labels or reverse:
            told: dict[str, Tensor] = {}
            loss = _of_outputs(model, found, wanted, batch["labels"], settings, told)
            terms["outputs"] = Term(loss, told=told)
        if inner is not None:
            terms |= inner.terms(batch)
        return terms

    return objective


def _of_outputs(
    model: Any, found: Tensor, wanted: Any, labels: Tensor, settings: DistillSettings, told: dict[str, Tensor]
) -> Tensor:
    """Return the loss of the logits `found` with the teacher's, whole or in buckets, and with the labels."""
    weights = settings.losses
    reverse = weights.reverse_kl or 0.0
    buckets, whole = (wanted, None) if isinstance(wanted, Buckets) else (None, wanted)
    loss: Tensor | None = None
    if buckets is None or weights.labels:
        loss = training_loss(
            getattr(model, "module", model).config, found, labels, whole, temperature=settings.temperature,
            logits_weight=0.0 if buckets else weights.logits, labels_weight=weights.labels or 0.0,
            reverse_weight=0.0 if buckets else reverse,
            smoothing=settings.label_smoothing if model.training else 0.0, told=told,
        )  # fmt: skip
    if buckets is None:
        assert loss is not None
        return loss
    more = bucket_loss(
        found, labels, buckets, temperature=settings.temperature,
        logits_weight=weights.logits, reverse_weight=reverse, told=told,
    )  # fmt: skip
    return more if loss is None else loss + more
