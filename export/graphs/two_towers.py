"""The graphs of a model with a tower for images and one for texts: `vision_model` and `text_model`.

The names are those of transformers.js; each returns embeddings of length 1, as transformers' CLIPModel.

Shapes: B = batch, L = tokens, D = dimension of the embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from smelt.export.graphs.attention import (
    AttentionScope,
    GraphSpec,
    attention_modules,
    exportable_attention,
    exportable_norms,
)
from smelt.models.families.registry import family_of
from smelt.models.image_text_model import image_embeds, text_embeds
from smelt.runtimes.image_text import IMAGE_EMBEDS, TEXT_EMBEDS, TEXT_GRAPH, VISION_GRAPH
from smelt.runtimes.images import PIXEL_VALUES


class TowerModel(nn.Module):
    """pixel_values float32 [B, 3, h, w], or input_ids int64 [B, L] -> float32 [B, D]."""

    def __init__(self, model: Any, input_kind: str) -> None:
        super().__init__()
        family = family_of(model)
        assert family is not None
        tower = next(tower for tower in family.towers if tower.input_kind == input_kind)
        self.model, self.scope, self.rms_norm = model, AttentionScope(), family.rms_norm
        self.attentions = attention_modules(model, tower.stack)
        self.embed = image_embeds if input_kind == "images" else text_embeds

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the embeddings."""
        with (
            exportable_attention(self.attentions, self.scope),
            exportable_norms(self.model, self.rms_norm),
        ):
            return self.embed(self.model, inputs).float()


def two_tower_graphs(model: Any, image_size: tuple[int, int]) -> list[GraphSpec]:
    """Return the two graphs of `model`, with small example inputs.

    image_size: height and width of the images.
    """
    pixels = torch.randn(2, 3, *image_size, generator=torch.Generator().manual_seed(0))
    # a text of the greatest length, which SigLIP always has
    length = int(model.config.text_config.max_position_embeddings)
    ids = torch.full((2, length), int(model.config.text_config.eos_token_id or 0))
    ids = ids.clamp(max=int(model.config.text_config.vocab_size) - 1)
    return [
        GraphSpec(
            VISION_GRAPH, TowerModel(model, "images"), (pixels,), [PIXEL_VALUES], [IMAGE_EMBEDS],
            ({0: "batch"},),
        ),
        GraphSpec(
            TEXT_GRAPH, TowerModel(model, "texts"), (ids,), ["input_ids"], [TEXT_EMBEDS],
            ({0: "batch", 1: "length"},),
        ),
    ]  # fmt: skip
