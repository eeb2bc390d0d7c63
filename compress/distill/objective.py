"""The distillation objective: compare outputs, inner states and sentence embeddings with the teacher's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compress.distill.ensembles import restricted_divergence
from smelt.compress.distill.inner_losses import InnerLosses
from smelt.compress.distill.layer_map import module_pairs
from smelt.compress.distill.logit_cache import CachedTeacher, TopKLogits, top_k_loss
from smelt.compress.distill.module_losses import ModuleLosses
from smelt.compress.distill.settings import DistillSettings
from smelt.core.errors import InputError
from smelt.core.messages import with_article
from smelt.data.labels import NO_CLASS
from smelt.models.image_text_model import embedding_width, has_two_towers, returns_embeddings
from smelt.models.user_module import UserModuleForArrays
from smelt.runtimes.images import DEFAULT_IMAGE_SIZE, PIXEL_VALUES, read_processor
from smelt.stage import Context
from smelt.training.extension import LossTerm
from smelt.training.losses import (
    batch_vectors,
    classification_loss,
    contrastive_loss,
    cosent_loss,
    model_inputs,
    model_logits,
)

if TYPE_CHECKING:
    from smelt.compress.distill.settings import LossWeights


def vector_loss_terms(
    vectors: Tensor, teacher_vectors: Tensor | None, scores: Tensor, weights: Mapping[str, float]
) -> dict[str, LossTerm]:
    """Return the terms of the losses with a weight: squared distance, pairwise similarity, CoSENT.

    Args:
        vectors: the student's vectors, float [T, D].
        teacher_vectors: the teacher's, float [T, any width]; None if they are not compared.
        scores: float [B, 1], of pairs.
        weights: the weights.
    """
    terms = {}
    if teacher_vectors is not None and weights["sentence_embedding"]:
        terms["sentence_embedding"] = LossTerm(
            weights["sentence_embedding"] * vector_distance_loss(vectors, teacher_vectors)
        )
    if teacher_vectors is not None and weights["pairwise_similarity"]:
        terms["pairwise_similarity"] = LossTerm(
            weights["pairwise_similarity"] * pairwise_similarity_loss(vectors, teacher_vectors)
        )
    if weights["cosent"]:
        terms["cosent"] = LossTerm(weights["cosent"] * cosent_loss(vectors, scores))
    return terms


def require_comparable_vectors(model: Any, teacher: Any, weights: LossWeights) -> None:
    """Require that the embeddings of student and teacher can be compared by the losses in `weights`.

    Raises:
        InputError: the teacher makes no embeddings, or embeddings of another width.
    """
    if not returns_embeddings(teacher):
        raise InputError(
            f"distill: the teacher, {with_article(type(teacher).__name__)}, returns no"
            " embeddings. Use an embedder as teacher.",
            code="different-kind",
            setting="teacher",
        )
    width, target_width = (embedding_width(each.config.to_dict()) for each in (model, teacher))
    if width != target_width and weights.vector_weights()["sentence_embedding"]:
        raise InputError(
            f"distill: the teacher's embeddings have width {target_width}, but the student's have {width}, so"
            " their distance is not defined. Compare only similarities: losses:"
            f" {{sentence_embedding: 0, pairwise_similarity: 1.0}}.",
            code="width-mismatch",
            setting="losses.sentence_embedding",
        )


def array_loss_terms(
    outputs: Mapping[str, Tensor], teacher: Mapping[str, Tensor], weights: LossWeights, temperature: float
) -> dict[str, LossTerm]:
    """Return the terms of the losses on outputs of a module of arrays, each a sum over the outputs.

    Args:
        outputs: the student's, float [B, ...].
        teacher: the teacher's, of the same shapes.
        weights: of `outputs`, the mean squared difference of all entries, and `logits`, T^2 KL(teacher ||
            student) over the last axis, the mean over the others.
        temperature: T.
    """
    terms = {}
    if weights.outputs:
        distances = [F.mse_loss(outputs[name].float(), teacher[name].float()) for name in outputs]
        terms["outputs"] = LossTerm(weights.outputs * torch.stack(distances).sum())
    if weights.logits:
        divergences = []
        for name, value in outputs.items():
            log_probs = (value.float() / temperature).log_softmax(dim=-1)
            expected = (teacher[name].float() / temperature).log_softmax(dim=-1)
            divergence = F.kl_div(log_probs, expected, reduction="none", log_target=True).sum(dim=-1)
            divergences.append(temperature**2 * divergence.mean())
        terms["logits"] = LossTerm(weights.logits * torch.stack(divergences).sum())
    return terms


def require_equal_outputs(student: Any, teacher: Any) -> None:
    """Require that two modules of arrays return the same outputs.

    Raises:
        InputError: `outputs-mismatch`.
    """
    shapes = []
    with torch.no_grad():
        for model in (student, teacher):
            outputs = model(**student.example_inputs(2)).arrays
            shapes.append({name: list(value.shape[1:]) for name, value in outputs.items()})
    if shapes[0] != shapes[1]:
        raise InputError(
            f"distill: the student returns {shapes[0]} for each sample, but the teacher {shapes[1]}. Both"
            " must return the same outputs.",
            code="outputs-mismatch",
            setting="teacher",
        )


def _array_outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of a module of arrays by name."""
    output: Any = model(**model_inputs(batch))
    arrays: dict[str, Tensor] = output.arrays
    return arrays


def make_inner_losses(
    student: Any, teacher: Any, settings: DistillSettings, seed: int, folder: Path | None = None
) -> InnerLosses | ModuleLosses | None:
    """Return the losses on inner states of the two models, None if the settings have none.

    folder: of the student, with its processor of images, if it is a model of images; for modules by name.

    Raises:
        InputError: the two models do not have what the losses compare.
    """
    if not settings.losses.inner_weights():
        return None
    if pairs := module_pairs(settings.layer_map):
        assert folder is not None
        return ModuleLosses(
            student,
            teacher,
            settings.losses.hidden_states or 0.0,
            pairs,
            _example_inputs(student, folder),
            seed,
            mean_over_layers=settings.layer_reduction == "mean",
        )
    return InnerLosses(
        student,
        teacher,
        settings.losses,
        settings.layer_map,
        settings.relation_heads,
        seed,
        mean_over_layers=settings.layer_reduction == "mean",
    )


_EXAMPLE_TOKENS = 8


def _example_inputs(model: Any, folder: Path) -> dict[str, Tensor]:
    """Return inputs of two samples. folder: of the model, with its processor if it is one of images."""
    if isinstance(model, UserModuleForArrays):
        return model.example_inputs(2)
    if model.main_input_name == "input_ids":
        ids = torch.arange(2 * _EXAMPLE_TOKENS).reshape(2, _EXAMPLE_TOKENS) % model.config.vocab_size
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    size = read_processor(folder).shape or (DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE)
    return {PIXEL_VALUES: torch.zeros(2, model.config.num_channels, *size)}


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
    predicts_tokens = not returns_embeddings(student) and student.can_generate()
    vocab_size = (
        (getattr(config, "decoder_vocab_size", None) or config.vocab_size) if predicts_tokens else None
    )
    return CachedTeacher(teacher, config, _teacher_call(teacher), settings, identity, vocab_size, ctx)


def _teacher_call(teacher: Any) -> Callable[[Any, Mapping[str, Tensor]], Any]:
    """Return the function that runs `teacher` on a batch."""
    if isinstance(teacher, UserModuleForArrays):
        return _array_outputs
    return batch_vectors if returns_embeddings(teacher) else model_logits


class DistillObjective:
    """The weighted losses of `settings` with `teacher` run on the same batch: an `Objective`.

    Args:
        teacher: in eval mode; has no gradient.
        settings: the weights, T, label smoothing.
        inner: captures tensors of both models (`InnerLosses.capture`).
        cached_teacher: provides the teacher's outputs; the teacher itself is not run.
    """

    def __init__(
        self,
        teacher: Any,
        settings: DistillSettings,
        inner: InnerLosses | ModuleLosses | None = None,
        cached_teacher: CachedTeacher | None = None,
    ) -> None:
        self._teacher, self._settings = teacher, settings
        if settings.torch_compile and cached_teacher is None:
            teacher.compile(dynamic=True)
        self._inner, self._cached_teacher = inner, cached_teacher
        self._label_groups: Sequence[Sequence[int]] | None = getattr(teacher, "label_groups", None)
        self._is_embedder, self._run_model = returns_embeddings(teacher), _teacher_call(teacher)
        weights, self._vector_weights = settings.losses, settings.losses.vector_weights()
        self._uses_teacher_outputs = bool(
            self._vector_weights["sentence_embedding"] or self._vector_weights["pairwise_similarity"]
            if self._is_embedder
            else weights.logits or weights.reverse_kl or weights.outputs
        )

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, LossTerm]:
        """Return the terms of the loss of `model` on a batch."""
        student_outputs, teacher_outputs = self._outputs(model, batch)
        weights, labels = self._settings.losses, batch["labels"]
        terms: dict[str, LossTerm] = {}
        if self._is_embedder:
            terms |= vector_loss_terms(student_outputs, teacher_outputs, labels, self._vector_weights)
            if weights.labels and has_two_towers(model):
                terms["labels"] = LossTerm(weights.labels * contrastive_loss(model, student_outputs))
        elif isinstance(student_outputs, dict):
            if teacher_outputs is not None:
                temperature = self._settings.temperature
                terms |= array_loss_terms(student_outputs, teacher_outputs, weights, temperature)
        elif weights.logits or weights.labels or weights.reverse_kl:
            components: dict[str, Tensor] = {}
            loss = _output_loss(
                model,
                student_outputs,
                teacher_outputs,
                labels,
                self._settings,
                components,
                self._label_groups,
            )
            terms["outputs"] = LossTerm(loss, components=components)
        if self._inner is not None:
            terms |= self._inner.loss_terms(batch)
        return terms

    def _outputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """Run both models; the teacher only if a loss uses its outputs and they are not cached."""
        if self._inner is not None:
            self._inner.clear()
        student_outputs, teacher_outputs = self._run_model(model, batch), None
        if self._cached_teacher is not None:
            cached = self._cached_teacher.outputs(batch) if self._uses_teacher_outputs else None
            return student_outputs, cached
        if self._uses_teacher_outputs or self._inner is not None:
            with torch.no_grad():
                teacher_outputs = self._run_model(self._teacher.to(batch["labels"].device), batch)
        return student_outputs, teacher_outputs if self._uses_teacher_outputs else None


def _output_loss(
    model: Any,
    logits: Tensor,
    wanted: Any,
    labels: Tensor,
    settings: DistillSettings,
    terms: dict[str, Tensor],
    label_groups: Sequence[Sequence[int]] | None,
) -> Tensor:
    """Return the loss of the logits `logits` against the teacher's (all or the top k) and the labels.

    label_groups: of teachers with different labels, as in `restricted_divergence`.
    """
    weights = settings.losses
    if settings.train_on == "both" and weights.labels and not bool(_is_labeled(labels).all()):
        return _mixed_loss(model, logits, wanted, labels, settings, terms)
    reverse = weights.reverse_kl or 0.0
    buckets, targets = (wanted, None) if isinstance(wanted, TopKLogits) else (None, wanted)
    if label_groups is not None and targets is not None:
        divergence = restricted_divergence(
            logits, targets, label_groups, labels if weights.labels else None,
            temperature=settings.temperature,
            logits_weight=weights.logits, reverse_weight=reverse, terms=terms,
        )  # fmt: skip
        if not weights.labels:
            return divergence
        smoothing = settings.label_smoothing_factor if model.training else 0.0
        config = getattr(model, "module", model).config
        return divergence + classification_loss(
            config, logits, labels, labels_weight=weights.labels, smoothing=smoothing, terms=terms
        )
    loss: Tensor | None = None
    if buckets is None or weights.labels:
        loss = classification_loss(
            getattr(model, "module", model).config, logits, labels, targets, temperature=settings.temperature,
            logits_weight=0.0 if buckets else weights.logits, labels_weight=weights.labels or 0.0,
            reverse_weight=0.0 if buckets else reverse,
            smoothing=settings.label_smoothing_factor if model.training else 0.0, terms=terms,
        )  # fmt: skip
    if buckets is None:
        assert loss is not None
        return loss
    bucket_loss = top_k_loss(
        logits, labels, buckets, temperature=settings.temperature,
        logits_weight=weights.logits, reverse_weight=reverse, terms=terms,
    )  # fmt: skip
    return bucket_loss if loss is None else loss + bucket_loss


def _mixed_loss(
    model: Any,
    logits: Tensor,
    wanted: Any,
    labels: Tensor,
    settings: DistillSettings,
    terms: dict[str, Tensor],
) -> Tensor:
    """Return the loss of a batch in which some samples have no label; as `_output_loss`.

    All samples have the losses on the teacher's outputs, the others also that with the labels; each loss is
    the sum over its samples, divided by all samples.
    """
    losses = settings.losses
    without = settings.model_copy(update={"losses": losses.model_copy(update={"labels": 0.0})})
    # the losses without labels read only the dtype of labels, and which positions count
    any_labels = labels.nan_to_num() if labels.is_floating_point() else labels.clamp(min=0)
    loss = _output_loss(model, logits, wanted, any_labels, without, terms, None)
    labeled = _is_labeled(labels)
    if not bool(labeled.any()):
        terms["labels"] = loss.detach().new_zeros(())
        return loss
    share, label_terms = float(labeled.float().mean()), dict[str, Tensor]()
    label_loss = classification_loss(
        getattr(model, "module", model).config, logits[labeled], labels[labeled],
        labels_weight=(losses.labels or 0.0) * share,
        smoothing=settings.label_smoothing_factor if model.training else 0.0, terms=label_terms,
    )  # fmt: skip
    terms.update(label_terms)
    return loss + label_loss


def _is_labeled(labels: Tensor) -> Tensor:
    """Return which samples have a label (see `classifier_targets`), bool [B]."""
    return ~labels.isnan().any(dim=1) if labels.is_floating_point() else labels != NO_CLASS


def vector_distance_loss(vectors: Tensor, teacher: Tensor) -> Tensor:
    """Return the squared distance of each vector from the teacher's, mean over texts.

    It is D times torch's MSELoss, which Reimers & Gurevych 2020 (arXiv:2004.09813) train students with, so
    that it is independent of the width: 2 - 2 cos for vectors of length 1.

    Args:
        vectors: float [T, D].
        teacher: float [T, D]; no gradient flows into it.
    """
    return (vectors - teacher.detach()).square().sum(dim=1).mean()


def pairwise_similarity_loss(vectors: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared difference of all pairwise cosines in a batch, student against teacher.

    Works for vectors of different widths: Tung & Mori 2019 (arXiv:1907.09682), with cosines for the rows of
    its similarity matrix.

    Args:
        vectors: float [T, D].
        teacher: float [T, any width]; no gradient flows into it.
    """
    return F.mse_loss(_cosine_matrix(vectors), _cosine_matrix(teacher.detach()))


def _cosine_matrix(vectors: Tensor) -> Tensor:
    """Return all pairwise cosines, [T, T]."""
    directions = F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=1)
    with torch.autocast(vectors.device.type, enabled=False):  # otherwise matmul is bfloat16
        return directions @ directions.t()
