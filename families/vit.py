"""ViT, the vision transformer. Source: transformers' modeling_vit.py; older names: conversion_mapping.py."""

from __future__ import annotations

from smelt.families.family import Attention, Config, Family, FeedForward, Positions, Rate, Stack
from smelt.families.stream import Stream

_AT = "vit.embeddings"
_PATCHES = f"{_AT}.patch_embeddings.projection"


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's blocks."""
    at = "attention"
    attention = Attention(
        at,
        query=f"{at}.q_proj",
        key=f"{at}.k_proj",
        value=f"{at}.v_proj",
        out=f"{at}.o_proj",
        heads="num_attention_heads",
        width="head_dim",
        setting="num_attention_heads",
        width_setting="head_dim",
    )
    block = FeedForward("mlp", "mlp.fc1", "mlp.fc2", "intermediate_size", "hidden_act")
    stream = Stream(
        (),
        norms=("layernorm_before", "layernorm_after"),
        norms_first=True,
        closing="vit.layernorm",
        beside=(
            (f"{_AT}.cls_token", 2),
            (f"{_AT}.position_embeddings", 2),
            (f"{_PATCHES}.weight", 0),
            (f"{_PATCHES}.bias", 0),
        ),
    )
    return (Stack("layers", "num_hidden_layers", "vit.layers", (attention,), block, stream),)


def refuses(config: Config) -> list[str]:
    """Return what of a config smelt cannot follow."""
    if config.get("num_channels", 3) != 3:
        return [f"num_channels is {config['num_channels']}; images are read as RGB, which has 3."]
    return []


FAMILY = Family(
    name="vit",
    kind="encoder",
    tasks=("image-classification",),
    stacks=stacks,
    embedding=(),
    width="hidden_size",
    rate=Rate(2e-5, 768),  # transformers' example of image classification
    head=("classifier",),
    reads="images",
    positions=Positions(None),
    renamed=(
        (r"encoder\.layer\.", "layers."),
        (r"attention\.attention\.query", "attention.q_proj"),
        (r"attention\.attention\.key", "attention.k_proj"),
        (r"attention\.attention\.value", "attention.v_proj"),
        (r"attention\.output\.dense", "attention.o_proj"),
        (r"intermediate\.dense", "mlp.fc1"),
        (r"output\.dense", "mlp.fc2"),
    ),
    unread=(r"vit\.pooler\..+", r"pooler\..+"),
    other_heads=(r"decoder\..+", r"vit\.embeddings\.mask_token"),
    refuses=refuses,
)
