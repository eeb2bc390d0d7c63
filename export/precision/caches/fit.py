"""Which models can keep their keys and values as int8: those whose attention is GroupQueryAttention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smelt.families.registry import find_family
from smelt.runtime.layers.fused_heads import fits_group_query_attention

TASK = "language-modeling"
FLOAT = "Set kv_cache: float."


def refused_task(task: str) -> str | None:
    """Return why the models of `task` have no cache that could be int8, or None."""
    if task == TASK:
        return None
    return (
        f"int8 caches are of decoder-only models, so of {TASK}, and the task is {task}: its models have none,"
        f" or an attention that ONNX Runtime has no int8 caches for. {FLOAT}"
    )


def refused_model(config: Mapping[str, Any]) -> str | None:
    """Return why the heads of a model with this config.json do not fit, or None, also where it says nothing.

    Families whose config has no word for the width of a head are looked at when they are exported.
    """
    family = find_family(config)
    for stack in family.stacks(config) if family is not None and family.kind == "decoder" else ():
        for one in stack.attentions:
            heads, whole = config.get(one.setting), config.get(str(family.width) if family else "")
            width = config.get(one.width_setting) if one.width_setting else None
            if one.width_setting and width is None and isinstance(heads, int) and isinstance(whole, int):
                width = whole // heads
            if isinstance(width, int) and (why := refused_width(width, one.rotary)):
                return why
    return None


def refused_width(width: int, rotary: bool) -> str | None:
    """Return why heads of `width` numbers do not fit, or None."""
    if fits_group_query_attention(width, rotary):
        return None
    step = 16 if rotary else 8
    return (
        f"int8 caches are an input of ONNX Runtime's GroupQueryAttention, which takes heads of {step},"
        f" {2 * step}, {3 * step}, ... numbers, and this model's have {width}. {FLOAT}"
    )
