"""Models of an image and a text in one space: two towers, each with its own inputs (CLIP, SigLIP).

transformers' model computes both in one call; here each tower is called alone, as its graph.

Shapes: B = batch, L = tokens, D = dimension of the embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smelt.models.families.config_keys import config_value
from smelt.models.families.family import Tower
from smelt.models.families.registry import family_of, find_family
from smelt.models.text_rules import is_sentence_model

if TYPE_CHECKING:
    from torch import Tensor


def has_two_towers(model: Any) -> bool:
    """Return whether a transformers model has a tower for images and one for texts."""
    family = family_of(getattr(model, "module", model))
    return family is not None and bool(family.towers)


def returns_embeddings(model: Any) -> bool:
    """Return whether the outputs of a transformers model are embeddings."""
    return is_sentence_model(model) or has_two_towers(model)


LOGIT_SCALE_KEY, LOGIT_BIAS_KEY = "smelt_logit_scale", "smelt_logit_bias"


def graph_settings(model: Any) -> dict[str, float]:
    """Return what config.json needs next to graphs of `model`: the factor and the bias of cosines as logits.

    Empty for other models. The graphs return embeddings, so that they do not have these weights.
    """
    if not has_two_towers(model):
        return {}
    settings = {LOGIT_SCALE_KEY: math.exp(float(model.logit_scale.detach()))}
    if hasattr(model, "logit_bias"):
        settings[LOGIT_BIAS_KEY] = float(model.logit_bias.detach())
    return settings


def text_tower(config: Mapping[str, Any]) -> Tower:
    """Return the tower of texts of a model with this config (config.json)."""
    family = find_family(config)
    assert family is not None
    return next(tower for tower in family.towers if tower.input_kind == "texts")


def embedding_width(config: Mapping[str, Any]) -> int:
    """Return D of an embedder with this config (config.json)."""
    family = find_family(config)
    width = family and (
        config_value(config, family.embedding_width_key)
        if family.embedding_width_key
        else family.hidden_size(config)
    )
    return int(width or 0)


def image_embeds(model: Any, pixel_values: Tensor) -> Tensor:
    """Return the embeddings of images, float [B, D] of length 1, from float [B, 3, h, w]."""
    return _unit_length(model.get_image_features(pixel_values=pixel_values).pooler_output)


def text_embeds(model: Any, input_ids: Tensor) -> Tensor:
    """Return the embeddings of texts, float [B, D] of length 1, from int64 [B, L].

    No mask is needed: CLIP's is causal, so that padding does not reach the end of a text, and SigLIP was
    trained without one.
    """
    return _unit_length(model.get_text_features(input_ids=input_ids).pooler_output)


def _unit_length(vectors: Tensor) -> Tensor:
    unit_vectors: Tensor = vectors / vectors.norm(p=2, dim=-1, keepdim=True)
    return unit_vectors
