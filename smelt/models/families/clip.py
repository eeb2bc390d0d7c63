"""CLIP, embeddings of images and texts in one space. Source: transformers' modeling_clip.py."""

from __future__ import annotations

from smelt.models.families.family import (
    IMAGE_TEXT_TASKS,
    Config,
    Family,
    PositionEncoding,
    PublishedLearningRate,
    Tower,
    config_value,
)


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
            "vision_layers", "vision_model", "vision_config", "clip_vision_model", "CLIPVisionModel", "images",
            ("visual_projection",),
        ),
        Tower(
            "text_layers", "text_model", "text_config", "clip_text_model", "CLIPTextModel", "texts", ("text_projection",),
        ),
    ),
    embedding_width_key="projection_dim",
    position_encoding=PositionEncoding("text_config.max_position_embeddings"),
    unused_tensors=(r".+\.position_ids",),
    unsupported_config=unsupported_config,
)  # fmt: skip
