"""Weights of the terms of the distillation loss, and which of them belong to which task."""

from __future__ import annotations

from pydantic import Field, model_validator

from smelt.core.data import SIMILARITY, Task
from smelt.core.errors import SettingError
from smelt.core.messages import Message, mistake
from smelt.core.stage import Settings

# Terms on inner states of both models.
INNER = ("hidden_states", "input_embeddings", "cosine", "attention", "self_attention_relations")
# Terms for sentence embedders, with their defaults.
_OF_VECTORS = {"sentence_embedding": 1.0, "pairwise_similarity": 1.0, "cosent": 0.0}


class LossWeights(Settings):
    """Weights of the terms of the loss."""

    logits: float = Field(default=1.0, ge=0, description="T^2 KL(teacher || student)")
    labels: float | None = Field(
        default=None,
        ge=0,
        description="cross-entropy; default 0 for generated text (1.0 without logits), 0.5 for classes",
    )
    sentence_embedding: float | None = Field(
        default=None,
        ge=0,
        description=f"{SIMILARITY}: squared distance to the teacher's vectors; default 1.0",
    )
    pairwise_similarity: float | None = Field(
        default=None,
        ge=0,
        description=f"{SIMILARITY}: MSE of the cosines within a batch; default 1.0",
    )
    cosent: float | None = Field(
        default=None,
        ge=0,
        description=f"{SIMILARITY}: CoSENT, the order of the pairs' scores",
    )

    reverse_kl: float | None = Field(default=None, ge=0, description="T^2 KL(student || teacher)")
    hidden_states: float | None = Field(
        default=None,
        ge=0,
        description="MSE of hidden states",
    )
    input_embeddings: float | None = Field(default=None, ge=0, description="MSE of the first layer's inputs")
    cosine: float | None = Field(default=None, ge=0, description="1 - cosine of the last hidden states")
    attention: float | None = Field(default=None, ge=0, description="MSE of attention scores before softmax")
    self_attention_relations: float | None = Field(
        default=None,
        ge=0,
        description="KL of relations of queries, keys and values (MiniLMv2)",
    )

    def from_teacher(self) -> bool:
        """Return whether any term compares with the teacher."""
        return bool(self.logits or self.reverse_kl or self.of_inner())

    def of_inner(self) -> dict[str, float]:
        """Return the weights above 0 of the terms on inner states."""
        return {name: weight for name in INNER if (weight := getattr(self, name))}

    def of_vectors(self) -> dict[str, float]:
        """Return the weights of the terms that compare vectors."""
        said = {name: getattr(self, name) for name in _OF_VECTORS}
        return {name: _OF_VECTORS[name] if value is None else value for name, value in said.items()}

    def unfit(self, task: Task) -> list[Message]:
        """Return the mistakes, with their settings: terms of another task, or no term at all."""
        mine = (
            {*_OF_VECTORS, *INNER} if task == SIMILARITY else set(type(self).model_fields) - set(_OF_VECTORS)
        )
        strange = sorted(name for name in self.model_fields_set - mine if getattr(self, name) is not None)
        known = ", ".join(sorted(mine))
        found = [
            mistake(
                "unknown-loss",
                f"is not a loss term of {task}. Known: {known}.",
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
    """The same for one of several phases: unnamed terms have weight 0."""

    logits: float = Field(default=0.0, ge=0, description="T^2 KL(teacher || student)")
    labels: float = Field(default=0.0, ge=0, description="cross-entropy")
    sentence_embedding: float | None = Field(
        default=None,
        ge=0,
        description=f"{SIMILARITY}: squared distance to the teacher's vectors",
    )
    pairwise_similarity: float | None = Field(
        default=None,
        ge=0,
        description=f"{SIMILARITY}: MSE of the cosines within a batch",
    )

    def of_vectors(self) -> dict[str, float]:
        """Return the weights of the terms that compare vectors."""
        return {name: getattr(self, name) or 0.0 for name in _OF_VECTORS}

    @model_validator(mode="after")
    def _something(self) -> PhaseWeights:
        if not any(getattr(self, name) for name in type(self).model_fields):
            raise SettingError("at least one weight must be above 0", code="no-loss")
        return self
