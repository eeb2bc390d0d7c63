"""SigLIP, CLIP with a sigmoid loss and another pooling. Source: transformers' modeling_siglip.py."""

from __future__ import annotations

from smelt.models.families.clip import unsupported_config
from smelt.models.families.family import (
    IMAGE_TEXT_TASKS,
    Family,
    PositionEncoding,
    PublishedLearningRate,
    Tower,
)

FAMILY = Family(
    name="siglip",
    tasks=IMAGE_TEXT_TASKS,
    learning_rate=PublishedLearningRate(5e-5, None),  # as CLIP
    input_kind="images-and-texts",
    towers=(
        Tower("vision_layers", "vision_model", "vision_config", "siglip_vision_model", "SiglipVisionModel", "images", (),
            example={"vision_use_head": False}),  # its pooling attends, too
        Tower(
            "text_layers", "text_model", "text_config", "siglip_text_model", "SiglipTextModel", "texts",
            ("text_model.head",), pads_to_limit=True,
        ),
    ),
    shared_config_keys=("vision_config.intermediate_size",),
    embedding_width_key="text_config.projection_size",
    position_encoding=PositionEncoding("text_config.max_position_embeddings"),
    unused_tensors=(r".+\.position_ids",),
    unsupported_config=unsupported_config,
)  # fmt: skip
