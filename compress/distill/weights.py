"""Weights of the parts of the distillation loss, and which of them belong to which task."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from smelt.core.data import SIMILARITY, Task
from smelt.core.errors import SettingError
from smelt.core.messages import Message, mistake
from smelt.core.stage import Settings

# Parts that look inside both models.
INNER = ("hidden", "embeddings", "cosine", "attention", "relations")
# Of sentence embedders, with what they are where nothing is said.
_OF_VECTORS = {"embedding": 1.0, "similarity": 1.0, "scores": 0.0}


class LossWeights(Settings):
    """Weights of the parts of the loss."""

    logits: float = Field(default=1.0, ge=0, description="of T^2 KL(teacher || student)")
    labels: float | None = Field(
        default=None,
        ge=0,
        description="of the cross-entropy with the labels; 0 for texts that are written (1.0 where no"
        " logits count), 0.5 for classes",
    )
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

    reverse_logits: float | None = Field(
        default=None, ge=0, description="0: of T^2 KL(student || teacher), the other way round"
    )
    hidden: float | None = Field(
        default=None,
        ge=0,
        description="0: of the MSE of the hidden states of the layers that layer_map names",
    )
    embeddings: float | None = Field(
        default=None, ge=0, description="0: of the MSE of what the first layer is given"
    )
    cosine: float | None = Field(
        default=None, ge=0, description="0: of 1 - cosine of the hidden states of the student's last layer"
    )
    attention: float | None = Field(
        default=None, ge=0, description="0: of the MSE of attention scores before their softmax"
    )
    relations: float | None = Field(
        default=None,
        ge=0,
        description="0: of the KL of how alike tokens are by queries, keys and values of the last layer",
    )

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is not said: it changes no other recipe's key."""
        found: dict[str, Any] = handler(self)
        return {name: value for name, value in found.items() if value is not None}

    def from_teacher(self) -> bool:
        """Return whether anything of the teacher counts."""
        return bool(self.logits or self.reverse_logits or self.of_inner())

    def of_inner(self) -> dict[str, float]:
        """Return the weights above 0 of the parts that look inside both models."""
        return {name: weight for name in INNER if (weight := getattr(self, name))}

    def of_vectors(self) -> dict[str, float]:
        """Return the weights of the parts that compare vectors."""
        said = {name: getattr(self, name) for name in _OF_VECTORS}
        return {name: _OF_VECTORS[name] if value is None else value for name, value in said.items()}

    def unfit(self, task: Task) -> list[Message]:
        """Return what is wrong, with its setting, where a part belongs to another task, or no part counts."""
        mine = (
            {*_OF_VECTORS, *INNER} if task == SIMILARITY else set(type(self).model_fields) - set(_OF_VECTORS)
        )
        strange = sorted(name for name in self.model_fields_set - mine if getattr(self, name) is not None)
        known = ", ".join(sorted(mine))
        found = [
            mistake(
                "unknown-loss",
                f"is no part of the loss of {task}; those are {known}.",
                setting=f"losses.{name}",
            )
            for name in strange
        ]
        if task == SIMILARITY and not any(self.of_vectors().values()) and not self.of_inner():
            found.append(mistake("no-loss", "at least one weight must be above 0.", setting="losses"))
        return found

    @model_validator(mode="after")
    def _something(self) -> LossWeights:
        if self.labels == 0 and not self.from_teacher():
            raise SettingError("at least one weight must be above 0", code="no-loss")
        return self


class PhaseWeights(LossWeights):
    """The same for one of several phases: a part that is not named does not count."""

    logits: float = Field(default=0.0, ge=0, description="of T^2 KL(teacher || student)")
    labels: float = Field(default=0.0, ge=0, description="of the cross-entropy with the labels")
    embedding: float | None = Field(
        default=None, ge=0, description=f"{SIMILARITY}: of the squared distance of teacher's and own vectors"
    )
    similarity: float | None = Field(
        default=None, ge=0, description=f"{SIMILARITY}: of the MSE of the cosines of a batch's texts"
    )

    def of_vectors(self) -> dict[str, float]:
        """Return the weights of the parts that compare vectors."""
        return {name: getattr(self, name) or 0.0 for name in _OF_VECTORS}

    @model_validator(mode="after")
    def _something(self) -> PhaseWeights:
        if not any(getattr(self, name) for name in type(self).model_fields):
            raise SettingError("at least one weight must be above 0", code="no-loss")
        return self
