"""Weights of the parts of the distillation loss, and which of them belong to which task."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from smelt.core.data import SIMILARITY, Task
from smelt.core.stage import Settings

# Of sentence embedders, with what they are where nothing is said.
_OF_VECTORS = {"embedding": 1.0, "similarity": 1.0, "scores": 0.0}


class LossWeights(Settings):
    """Weights of the parts of the loss."""

    logits: float = Field(default=1.0, ge=0, description="of T^2 KL(teacher || student)")
    labels: float = Field(default=0.5, ge=0, description="of the cross-entropy with the labels")
    embedding: float | None = Field(
        default=None,
        ge=0,
        description=f"{SIMILARITY}, 1.0: of the squared distance of teacher's and own vectors",
    )
    similarity: float | None = Field(
        default=None, ge=0, description=f"{SIMILARITY}, 1.0: of the MSE of the cosines of a batch's texts"
    )
    scores: float | None = Field(
        default=None, ge=0, description=f"{SIMILARITY}, 0: of CoSENT, the order of the pairs' scores"
    )

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is not said of vectors: it changes no other task's key."""
        found: dict[str, Any] = handler(self)
        return {name: value for name, value in found.items() if value is not None}

    def of_vectors(self) -> dict[str, float]:
        """Return the weights of the parts that compare vectors."""
        said = {name: getattr(self, name) for name in _OF_VECTORS}
        return {name: _OF_VECTORS[name] if value is None else value for name, value in said.items()}

    def unfit(self, task: Task) -> list[tuple[str, str]]:
        """Return (setting, what is wrong) where a part belongs to another task, or no part counts."""
        mine = set(_OF_VECTORS) if task == SIMILARITY else set(type(self).model_fields) - set(_OF_VECTORS)
        strange = sorted(name for name in self.model_fields_set - mine if getattr(self, name) is not None)
        known = ", ".join(sorted(mine))
        found = [
            (f"losses.{name}", f"is no part of the loss of {task}; those are {known}.") for name in strange
        ]
        if task == SIMILARITY and not any(self.of_vectors().values()):
            found.append(("losses", "at least one weight must be above 0."))
        return found

    @model_validator(mode="after")
    def _something(self) -> LossWeights:
        if not self.logits and not self.labels:
            raise ValueError("at least one weight must be above 0")
        return self
