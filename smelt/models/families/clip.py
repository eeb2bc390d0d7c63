"""CLIP, embeddings of images and texts in one space. Source: transformers' modeling_clip.py."""

from __future__ import annotations

from smelt.models.families.config_keys import config_value
from smelt.models.families.family import (
    IMAGE_TEXT_TASKS,
    Family,
    PositionEncoding,
    PublishedLearningRate,
    Tower,
)
from smelt.models.families.layout import Config


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config of two towers."""
    channels = config_value(config, "vision_config.num_channels")
    if channels not in (None, 3):
        return [f"num_channels of vision_config is {channels}; only 3 (RGB) is supported."]
    return []


FAMILY = Family(
    name="clip",
    tasks=IMAGE_TEXT_TASKS,
    learning_rate=PublishedLearningRate(5e-5, None),  # transformers' example run_clip.py
    input_kind="images-and-texts",
    towers=(
        Tower(
            stack="vision_layers",
            module="vision_model",
            config_key="vision_config",
            model_type="clip_vision_model",
            class_name="CLIPVisionModel",
            input_kind="images",
        ),
        Tower(
            stack="text_layers",
            module="text_model",
            config_key="text_config",
            model_type="clip_text_model",
            class_name="CLIPTextModel",
            input_kind="texts",
        ),
    ),
    embedding_width_key="projection_dim",
    position_encoding=PositionEncoding("text_config.max_position_embeddings"),
    unused_tensors=(r".+\.position_ids",),
    unsupported_config=unsupported_config,
)
