"""Knowledge distillation on the vectors of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smelt.core.errors import InputError
from smelt.core.text import article

if TYPE_CHECKING:
    from smelt.compress.distill.weights import LossWeights
    from smelt.compress.train.loop import Objective


def vectors_objective(teacher: Any, weights: LossWeights) -> Objective:
    """Return the weighted sum of `distance_loss`, `similarity_loss` and, with scores, `order_loss`.

    Args:
        teacher: a sentence embedder in eval mode, run on the same batch.
        weights: of the parts; what is not said has its default for this task.
    """
    import torch

    from smelt.compress.train.sentence_losses import distance_loss, order_loss, similarity_loss, vectors_of

    parts = weights.of_vectors()

    def objective(model: Any, batch: Any) -> Any:
        found = vectors_of(model, batch)
        loss = found.new_zeros(())
        if parts["embedding"] or parts["similarity"]:
            with torch.no_grad():
                wanted = vectors_of(teacher.to(found.device), batch)
            if parts["embedding"]:
                loss = loss + parts["embedding"] * distance_loss(found, wanted)
            if parts["similarity"]:
                loss = loss + parts["similarity"] * similarity_loss(found, wanted)
        if parts["scores"]:
            loss = loss + parts["scores"] * order_loss(found, batch["labels"])
        return loss

    return objective


def require_fit(model: Any, teacher: Any, weights: LossWeights) -> None:
    """Require that the vectors of student and teacher can be compared as `weights` want it.

    Raises:
        InputError: the teacher makes no vectors, or vectors of another width.
    """
    from smelt.runtime.models.sentence_model import is_sentence_model

    if not is_sentence_model(teacher):
        raise InputError(
            f"distill: the teacher, {article(type(teacher).__name__)}, makes no vectors of texts."
        )
    own, other = model.config.hidden_size, teacher.config.hidden_size
    if own != other and weights.of_vectors()["embedding"]:
        raise InputError(
            f"distill: the teacher's vectors have {other} numbers, the student's {own}; their distance is not"
            " defined. Compare cosines alone: losses: {embedding: 0, similarity: 1.0}."
        )
