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
        Tower(
            stack="vision_layers",
            module="vision_model",
            config_key="vision_config",
            model_type="siglip_vision_model",
            class_name="SiglipVisionModel",
            input_kind="images",
            example={"vision_use_head": False},  # its pooling attends, too
        ),
        Tower(
            stack="text_layers",
            module="text_model",
            config_key="text_config",
            model_type="siglip_text_model",
            class_name="SiglipTextModel",
            input_kind="texts",
            pads_to_limit=True,
        ),
    ),
    shared_config_keys=("vision_config.intermediate_size",),
    embedding_width_key="text_config.projection_size",
    position_encoding=PositionEncoding("text_config.max_position_embeddings"),
    unused_tensors=(r".+\.position_ids",),
    unsupported_config=unsupported_config,
)
