"""Knowledge distillation on the vectors of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError
from smelt.core.text import article

if TYPE_CHECKING:
    from torch import Tensor

    from smelt.compress.distill.weights import LossWeights
    from smelt.compress.train.terms import Term


def vectors_terms(
    found: Tensor, wanted: Tensor | None, scores: Tensor, parts: Mapping[str, float]
) -> dict[str, Term]:
    """Return `distance_loss`, `similarity_loss` and `order_loss` by name, those whose weight is not 0.

    Args:
        found: the student's vectors, float [T, D].
        wanted: the teacher's, float [T, any width]; None where they are not compared.
        scores: float [B, 1], of pairs.
        parts: the weights.
    """
    from smelt.compress.train.losses.of_sentences import distance_loss, order_loss, similarity_loss
    from smelt.compress.train.terms import Term

    terms = {}
    if wanted is not None and parts["sentence_embedding"]:
        terms["sentence_embedding"] = Term(parts["sentence_embedding"] * distance_loss(found, wanted))
    if wanted is not None and parts["pairwise_similarity"]:
        terms["pairwise_similarity"] = Term(parts["pairwise_similarity"] * similarity_loss(found, wanted))
    if parts["cosent"]:
        terms["cosent"] = Term(parts["cosent"] * order_loss(found, scores))
    return terms


def require_fit(model: Any, teacher: Any, weights: LossWeights) -> None:
    """Require that the vectors of student and teacher can be compared as `weights` want it.

    Raises:
        InputError: the teacher makes no vectors, or vectors of another width.
    """
    from smelt.runtime.models.sentence_model import is_sentence_model

    if not is_sentence_model(teacher):
        raise InputError(
            f"distill: the teacher, {article(type(teacher).__name__)}, makes no vectors of texts.",
            code="different-kind",
            setting="teacher",
        )
    own, other = model.config.hidden_size, teacher.config.hidden_size
    if own != other and weights.of_vectors()["sentence_embedding"]:
        raise InputError(
            f"distill: the teacher's vectors have {other} numbers, the student's {own}; their distance is not"
            " defined. Compare cosines alone: losses: {sentence_embedding: 0, pairwise_similarity: 1.0}.",
            code="width-mismatch",
            setting="losses.sentence_embedding",
        )
