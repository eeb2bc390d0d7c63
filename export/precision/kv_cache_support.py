"""Check which models support int8 keys and values: those whose attention is GroupQueryAttention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smelt.models.families.registry import find_family
from smelt.models.gqa_support import supports_gqa

KV_CACHE_TASK = "language-modeling"
FLOAT_CACHE_HINT = "Set kv_cache: float."


def unsupported_task(task: str) -> str | None:
    """Return why models of `task` do not support int8 caches, or None."""
    if task == KV_CACHE_TASK:
        return None
    return (
        f"ONNX Runtime supports int8 caches only for decoder-only models (task {KV_CACHE_TASK}); the task is"
        f" {task}. {FLOAT_CACHE_HINT}"
    )


def unsupported_model(config: Mapping[str, Any]) -> str | None:
    """Return why the heads of a model with this config.json do not fit, or None, also if unknown.

    Families whose config does not contain the head width are checked at export.
    """
    family = find_family(config)
    for stack in family.stacks(config) if family is not None and family.architecture == "decoder" else ():
        for attention in stack.attentions:
            heads, whole = (
                config.get(attention.heads_key),
                config.get(str(family.hidden_size_key) if family else ""),
            )
            width = config.get(attention.head_dim_key) if attention.head_dim_key else None
            if attention.head_dim_key and width is None and isinstance(heads, int) and isinstance(whole, int):
                width = whole // heads
            if isinstance(width, int) and (why := unsupported_head_dim(width, attention.rotary)):
                return why
    return None


def unsupported_head_dim(head_dim: int, rotary: bool) -> str | None:
    """Return why heads of width `head_dim` do not fit, or None."""
    if supports_gqa(head_dim, rotary):
        return None
    step = 16 if rotary else 8
    return (
        f"int8 caches need ONNX Runtime's GroupQueryAttention, which supports head sizes of {step},"
        f" {2 * step}, {3 * step}, ..., but this model's is {head_dim}. {FLOAT_CACHE_HINT}"
    )
