"""Sentence embedder: an encoder whose output is one vector per text, pooled and normalized.

It is a transformers model like a classifier without a head: its body has the name that it has in the family's
other models, so that parts are found by their names. In a file for other readers (no edits) the names are
those of the bare encoder, as in sentence-transformers and AutoModel.

Shapes: B = batch, L = tokens, D = width.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import ModelOutput

from smelt.core.errors import InputError
from smelt.core.messages import with_article
from smelt.models.text_rules import SentenceRules

# Below all values of hidden states, and finite in float16.
_MASKED_VALUE = -1e4


@dataclass
class SentenceOutput(ModelOutput):  # type: ignore[misc]
    """sentence_embedding: float [B, D]."""

    sentence_embedding: Tensor | None = None


def sentence_class(config: Any, rules: SentenceRules) -> Any:
    """Return the sentence embedder class for a config of transformers.

    Raises:
        InputError: transformers has no bare encoder for it.
    """
    body = transformers.MODEL_MAPPING.get(type(config), None)
    if body is None:
        raise InputError(
            f"config.json: {with_article(config.model_type)} model has no bare encoder for sentence"
            " embeddings.",
            code="unsupported-family",
        )
    parent: Any = body.__bases__[0]  # the family's, which initializes its weights

    class SentenceModel(parent):  # type: ignore[misc]
        """input_ids, attention_mask int64 [B, L] -> sentence_embedding float [B, D]."""

        sentence_rules = rules
        body_class = body

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            setattr(self, self.base_model_prefix, body(config, **_without_pooler(body)))
            self.post_init()

        def forward(
            self,
            input_ids: Tensor,
            attention_mask: Tensor | None = None,
            token_type_ids: Tensor | None = None,
        ) -> SentenceOutput:
            types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            hidden = self.base_model(input_ids, attention_mask=attention_mask, **types).last_hidden_state
            return SentenceOutput(sentence_embedding=pool_hidden_states(hidden, attention_mask, rules))

    return SentenceModel


def _without_pooler(body: Any) -> dict[str, bool]:
    """Return the argument that omits the pooler, which no embedder uses, where `body` has it."""
    parameter_names = inspect.signature(body.__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in parameter_names else {}


def pool_hidden_states(hidden: Tensor, mask: Tensor | None, rules: SentenceRules) -> Tensor:
    """Return one vector for each text, float [B, D].

    Args:
        hidden: float [B, L, D], the last hidden states.
        mask: int64 [B, L], 1 for tokens; padding is ignored. None: no padding.
        rules: pooling and normalization.
    """
    if rules.pooling == "cls":
        pooled = hidden[:, 0]
    elif rules.pooling == "max":
        masked = hidden if mask is None else hidden.masked_fill(mask[:, :, None] == 0, _MASKED_VALUE)
        pooled = masked.amax(dim=1)
    elif mask is None:
        pooled = hidden.mean(dim=1)
    else:
        # mean of shares that sum to 1: no sum over a long text exceeds the range of float16
        weights = mask.to(hidden.dtype)
        normalized_weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1)
        pooled = (normalized_weights[:, None, :] @ hidden)[:, 0]
    if rules.normalize:
        pooled = pooled / torch.linalg.vector_norm(pooled, dim=-1, keepdim=True).clamp(min=1e-12)
    return pooled


def head_output(output: Any) -> Tensor:
    """Return the output of a transformers model's head: logits, or the vectors of texts.

    Those of images and texts are float [2 B, D], the images' first. Logits of spans are float [B, L, 2], for
    each token those of a start and of an end.
    """
    if has_span_logits(output):
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    if getattr(output, "image_embeds", None) is not None:
        return torch.cat([output.image_embeds, output.text_embeds])
    result: Any = output.sentence_embedding if isinstance(output, SentenceOutput) else output.logits
    return cast("Tensor", result)


def has_span_logits(output: Any) -> bool:
    """Return whether a transformers model's output has logits of spans."""
    return getattr(output, "start_logits", None) is not None


def as_bare_encoder(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the `tensors` of a sentence model under the names of its bare encoder."""
    prefix = f"{model.base_model_prefix}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
