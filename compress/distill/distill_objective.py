"""The distillation objective: compares outputs and inner states of the student with the teacher's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.distill.inner_losses import InnerLosses
from smelt.compress.distill.losses.top_k import TopKLogits, top_k_loss
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.teachers.cached_teacher import CachedTeacher, TeacherCall
from smelt.compress.distill.vector_losses import vector_loss_terms
from smelt.compress.train.loss_terms import LossTerm, Objective
from smelt.compress.train.losses.classification import classification_loss
from smelt.compress.train.losses.sentence_vectors import batch_sentence_vectors
from smelt.compress.train.objective import model_logits
from smelt.core.stage import Context
from smelt.runtime.models.sentence_model import is_sentence_model


def make_inner_losses(student: Any, teacher: Any, settings: DistillSettings, seed: int) -> InnerLosses | None:
    """Return the losses on inner states of the two models, None if the settings have none.

    Raises:
        InputError: the two models do not have what the losses compare.
    """
    if not settings.losses.inner_weights():
        return None
    return InnerLosses(student, teacher, settings.losses, settings.layer_map, settings.relation_heads, seed)


def make_cached_teacher(
    teacher: Any, identity: Mapping[str, Any], student: Any, settings: DistillSettings, ctx: Context
) -> CachedTeacher:
    """Return the cache of the outputs of `teacher` if `cache_logits` is set, else None.

    Args:
        teacher: in eval mode, on the CPU.
        identity: identifies the teacher (`teacher_identity`).
        student: for the form of its inputs.
        settings: of the step.
        ctx: the store, device, threads.
    """
    config = student.config
    of_words = not is_sentence_model(student) and student.can_generate()
    words = (getattr(config, "decoder_vocab_size", None) or config.vocab_size) if of_words else None
    return CachedTeacher(teacher, config, _teacher_call(teacher), settings, identity, words, ctx)


def _teacher_call(teacher: Any) -> TeacherCall:
    """Return the function that runs `teacher` on a batch."""
    return batch_sentence_vectors if is_sentence_model(teacher) else model_logits


def distill_objective(
    teacher: Any,
    settings: DistillSettings,
    inner: InnerLosses | None = None,
    cached_teacher: CachedTeacher | None = None,
) -> Objective:
    """Return the weighted losses of `settings` with `teacher` (eval mode) run on the same batch.

    Args:
        teacher: has no gradient.
        settings: the weights, T, label smoothing.
        inner: captures tensors of both models (`InnerLosses.capture`).
        cached_teacher: provides the teacher's outputs; the teacher itself is not run.
    """
    weights = settings.losses
    embeds = is_sentence_model(teacher)
    reverse = weights.reverse_kl or 0.0
    parts = weights.vector_weights()
    compares = bool(
        parts["sentence_embedding"] or parts["pairwise_similarity"] if embeds else weights.logits or reverse
    )
    ask = _teacher_call(teacher)

    def outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """Run both models; the teacher only if a loss uses its outputs and they are not cached."""
        if inner is not None:
            inner.clear()
        found, wanted = ask(model, batch), None
        if cached_teacher is not None:
            return found, cached_teacher.outputs(batch) if compares else None
        if compares or inner is not None:
            with torch.no_grad():
                wanted = ask(teacher.to(batch["labels"].device), batch)
        return found, wanted if compares else None

    def objective(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, LossTerm]:
        found, wanted = outputs(model, batch)
        terms: dict[str, LossTerm] = {}
        if embeds:
            terms |= vector_loss_terms(found, wanted, batch["labels"], parts)
        elif weights.logits or weights.labels or reverse:
            told: dict[str, Tensor] = {}
            loss = _output_loss(model, found, wanted, batch["labels"], settings, told)
            terms["outputs"] = LossTerm(loss, components=told)
        if inner is not None:
            terms |= inner.loss_terms(batch)
        return terms

    return objective


def _output_loss(
    model: Any,
    found: Tensor,
    wanted: Any,
    labels: Tensor,
    settings: DistillSettings,
    terms: dict[str, Tensor],
) -> Tensor:
    """Return the loss of the logits `found` against the teacher's (all or the top k) and the labels."""
    weights = settings.losses
    reverse = weights.reverse_kl or 0.0
    buckets, whole = (wanted, None) if isinstance(wanted, TopKLogits) else (None, wanted)
    loss: Tensor | None = None
    if buckets is None or weights.labels:
        loss = classification_loss(
            getattr(model, "module", model).config, found, labels, whole, temperature=settings.temperature,
            logits_weight=0.0 if buckets else weights.logits, labels_weight=weights.labels or 0.0,
            reverse_weight=0.0 if buckets else reverse,
            smoothing=settings.label_smoothing if model.training else 0.0, told=terms,
        )  # fmt: skip
    if buckets is None:
        assert loss is not None
        return loss
    more = top_k_loss(
        found, labels, buckets, temperature=settings.temperature,
        logits_weight=weights.logits, reverse_weight=reverse, terms=terms,
    )  # fmt: skip
    return more if loss is None else loss + more
