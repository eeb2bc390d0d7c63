"""DINOv2, a vision transformer with LayerScale.

Source: transformers' modeling_dinov2.py; names in checkpoints: conversion_mapping.py.

Its head reads the first token next to the mean of the patches. Positions are interpolated to the size of the
images of the processor, whatever size the model was trained with.
"""

from __future__ import annotations

from smelt.models.families import vit
from smelt.models.families.family import IMAGE_TASKS, Family, PositionEncoding, PublishedLearningRate
from smelt.models.families.layout import Config


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config."""
    problems = vit.unsupported_config(config)
    if config.get("use_swiglu_ffn"):
        problems.append("use_swiglu_ffn is true (giant); only models with fc1 and fc2 are supported.")
    return problems


FAMILY = Family(
    name="dinov2",
    tasks=IMAGE_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 768),  # as ViT; the published recipe trains a head alone
    input_kind="images",
    position_encoding=PositionEncoding(None),
    renamed_tensors=(
        (r"attention\.attention\.query", "attention.q_proj"),
        (r"attention\.attention\.key", "attention.k_proj"),
        (r"attention\.attention\.value", "attention.v_proj"),
        (r"attention\.output\.dense", "attention.o_proj"),
    ),
    other_head_tensors=(r"dinov2\.embeddings\.mask_token",),
    unsupported_config=unsupported_config,
)
