"""Which heads ONNX Runtime's GroupQueryAttention takes; a plan asks it too, so nothing here imports torch."""

from __future__ import annotations


def fits_group_query_attention(width: int, rotary: bool) -> bool:
    """Say whether the operator takes heads of this width: it asks for multiples of 8, of 16 to rotate."""
    return width % (16 if rotary else 8) == 0
