"""Weights of the distillation loss terms, and the task that each term belongs to."""

from __future__ import annotations

from pydantic import Field, model_validator

from smelt.core.data import SENTENCE_SIMILARITY, Task
from smelt.core.errors import SettingError
from smelt.core.messages import Message, error_message
from smelt.core.stage import Settings

# Terms on inner states of both models.
INNER_LOSSES = ("hidden_states", "input_embeddings", "cosine", "attention", "self_attention_relations")
# Terms for sentence embedders, with their defaults.
_VECTOR_LOSS_DEFAULTS = {"sentence_embedding": 1.0, "pairwise_similarity": 1.0, "cosent": 0.0}


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
        description=f"{SENTENCE_SIMILARITY}: squared distance to the teacher's vectors; default 1.0",
    )
    pairwise_similarity: float | None = Field(
        default=None,
        ge=0,
        description=f"{SENTENCE_SIMILARITY}: MSE of the cosines within a batch; default 1.0",
    )
    cosent: float | None = Field(
        default=None,
        ge=0,
        description=f"{SENTENCE_SIMILARITY}: CoSENT loss on the order of the pairs' scores",
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
        description="KL of the self-attention relations of queries, keys and values (MiniLMv2)",
    )

    def uses_teacher(self) -> bool:
        """Return whether any term uses the teacher."""
        return bool(self.logits or self.reverse_kl or self.inner_weights())

    def inner_weights(self) -> dict[str, float]:
        """Return the weights above 0 of the terms on inner states."""
        return {name: weight for name in INNER_LOSSES if (weight := getattr(self, name))}

    def vector_weights(self) -> dict[str, float]:
        """Return the weights of the terms that compare vectors."""
        said = {name: getattr(self, name) for name in _VECTOR_LOSS_DEFAULTS}
        return {name: _VECTOR_LOSS_DEFAULTS[name] if value is None else value for name, value in said.items()}

    def check_task(self, task: Task) -> list[Message]:
        """Return the mistakes, each with its setting: terms of another task, or no term at all."""
        mine = (
            {*_VECTOR_LOSS_DEFAULTS, *INNER_LOSSES}
            if task == SENTENCE_SIMILARITY
            else set(type(self).model_fields) - set(_VECTOR_LOSS_DEFAULTS)
        )
        strange = sorted(name for name in self.model_fields_set - mine if getattr(self, name) is not None)
        known = ", ".join(sorted(mine))
        found = [
            error_message(
                "unknown-loss",
                f"no such loss term for {task}. Available: {known}.",
                setting=f"losses.{name}",
            )
            for name in strange
        ]
        if (
            task == SENTENCE_SIMILARITY
            and not any(self.vector_weights().values())
            and not self.inner_weights()
        ):
            found.append(
                error_message("no-loss", "all weights are 0; at least one must be above 0.", setting="losses")
            )
        return found

    @model_validator(mode="after")
    def _something(self) -> LossWeights:
        if self.labels == 0 and not self.uses_teacher():
            raise SettingError("all loss weights are 0; at least one must be above 0", code="no-loss")
        return self


class PhaseWeights(LossWeights):
    """Loss weights of one of several phases: terms that are not named have weight 0."""

    logits: float = Field(default=0.0, ge=0, description="T^2 KL(teacher || student)")
    labels: float = Field(default=0.0, ge=0, description="cross-entropy")
    sentence_embedding: float | None = Field(
        default=None,
        ge=0,
        description=f"{SENTENCE_SIMILARITY}: squared distance to the teacher's vectors",
    )
    pairwise_similarity: float | None = Field(
        default=None,
        ge=0,
        description=f"{SENTENCE_SIMILARITY}: MSE of the cosines within a batch",
    )

    def vector_weights(self) -> dict[str, float]:
        """Return the weights of the terms that compare vectors."""
        return {name: getattr(self, name) or 0.0 for name in _VECTOR_LOSS_DEFAULTS}

    @model_validator(mode="after")
    def _something(self) -> PhaseWeights:
        if not any(getattr(self, name) for name in type(self).model_fields):
            raise SettingError("all weights are 0; at least one must be above 0", code="no-loss")
        return self
