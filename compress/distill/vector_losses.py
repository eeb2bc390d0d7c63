"""Distillation losses on sentence embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError
from smelt.core.text import with_article

if TYPE_CHECKING:
    from torch import Tensor

    from smelt.compress.distill.loss_weights import LossWeights
    from smelt.compress.train.loss_terms import LossTerm


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
    from smelt.compress.train.loss_terms import LossTerm
    from smelt.compress.train.losses.sentence_vectors import (
        cosent_loss,
        pairwise_similarity_loss,
        vector_distance_loss,
    )

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
    from smelt.runtime.models.sentence_model import is_sentence_model

    if not is_sentence_model(teacher):
        raise InputError(
            f"distill: the teacher, {with_article(type(teacher).__name__)}, is not a sentence"
            " embedder. Use a sentence embedder as teacher.",
            code="different-kind",
            setting="teacher",
        )
    own, other = model.config.hidden_size, teacher.config.hidden_size
    if own != other and weights.vector_weights()["sentence_embedding"]:
        raise InputError(
            f"distill: the teacher's embeddings have width {other}, but the student's have {own}, so"
            " their distance is not defined. Compare only similarities: losses:"
            f" {{sentence_embedding: 0, pairwise_similarity: 1.0}}.",
            code="width-mismatch",
            setting="losses.sentence_embedding",
        )
