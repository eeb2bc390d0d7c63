"""Head widths that ONNX Runtime's GroupQueryAttention supports; without torch, since a plan imports it."""

from __future__ import annotations


def supports_gqa(head_dim: int, rotary: bool) -> bool:
    """Return whether the operator supports this head width: multiples of 8, of 16 with rotation."""
    return head_dim % (16 if rotary else 8) == 0
