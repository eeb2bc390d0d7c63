"""ViT, the vision transformer. Source: transformers' modeling_vit.py; older names: conversion_mapping.py."""

from __future__ import annotations

from smelt.models.families.family import (
    Attention,
    Config,
    Family,
    FeedForward,
    PositionEncoding,
    PublishedLearningRate,
    ResidualStream,
    Stack,
)

_EMBEDDINGS_PATH = "vit.embeddings"
_PATCH_PROJECTION = f"{_EMBEDDINGS_PATH}.patch_embeddings.projection"


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's blocks."""
    at = "attention"
    attention = Attention(
        at,
        query=f"{at}.q_proj",
        key=f"{at}.k_proj",
        value=f"{at}.v_proj",
        out=f"{at}.o_proj",
        heads_attribute="num_attention_heads",
        head_dim_attribute="head_dim",
        heads_key="num_attention_heads",
        head_dim_key="head_dim",
    )
    block = FeedForward("mlp", "mlp.fc1", "mlp.fc2", "intermediate_size", "hidden_act")
    stream = ResidualStream(
        (),
        part_norms=("layernorm_before", "layernorm_after"),
        pre_norm=True,
        final_norm="vit.layernorm",
        other_tensors=(
            (f"{_EMBEDDINGS_PATH}.cls_token", 2),
            (f"{_EMBEDDINGS_PATH}.position_embeddings", 2),
            (f"{_PATCH_PROJECTION}.weight", 0),
            (f"{_PATCH_PROJECTION}.bias", 0),
        ),
    )
    return (Stack("layers", "num_hidden_layers", "vit.layers", (attention,), block, stream),)


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config."""
    if config.get("num_channels", 3) != 3:
        return [f"num_channels is {config['num_channels']}; only 3 (RGB) is supported."]
    return []


FAMILY = Family(
    name="vit",
    architecture="encoder",
    tasks=("image-classification",),
    stacks=stacks,
    embedding_suffixes=(),
    hidden_size_key="hidden_size",
    learning_rate=PublishedLearningRate(2e-5, 768),  # transformers' example of image classification
    head_modules=("classifier",),
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
