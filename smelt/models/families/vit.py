"""ViT, the vision transformer. Source: transformers' modeling_vit.py; older names: conversion_mapping.py."""

from __future__ import annotations

from smelt.models.families.family import IMAGE_TASKS, Family, PositionEncoding, PublishedLearningRate
from smelt.models.families.layout import Config

_EMBEDDINGS_PATH = "vit.embeddings"
_PATCH_PROJECTION = f"{_EMBEDDINGS_PATH}.patch_embeddings.projection"


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config."""
    if config.get("num_channels", 3) != 3:
        return [f"num_channels is {config['num_channels']}; only 3 (RGB) is supported."]
    return []


FAMILY = Family(
    name="vit",
    tasks=IMAGE_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 768),  # transformers' example of image classification
    input_kind="images",
    position_encoding=PositionEncoding(None),
    renamed_tensors=(
        (r"encoder\.layer\.", "layers."),
        (r"attention\.attention\.query", "attention.q_proj"),
        (r"attention\.attention\.key", "attention.k_proj"),
        (r"attention\.attention\.value", "attention.v_proj"),
        (r"attention\.output\.dense", "attention.o_proj"),
        (r"intermediate\.dense", "mlp.fc1"),
        (r"output\.dense", "mlp.fc2"),
    ),
    unused_tensors=(r"vit\.pooler\..+", r"pooler\..+"),
    other_head_tensors=(r"decoder\..+", r"vit\.embeddings\.mask_token"),
    unsupported_config=unsupported_config,
)
