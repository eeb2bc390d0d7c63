"""Attention as the exported graph computes it.

It is one fused operator (com.microsoft::MultiHeadAttention) for ONNX Runtime on the CPU, or standard
operators elsewhere.

Shapes: B = batch, S = queries, T = keys, P = past length, H = heads, d = width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from smelt.runtime.layers import emit
from smelt.runtime.layers.low_rank_linear import LowRankLinear
from smelt.runtime.layers.quantized import concat_quantized
from smelt.runtime.layers.scaled_linear import ScaledLinear

KeyValue = tuple[Tensor, Tensor]
MASK_VALUE = -10000.0  # masks everything after softmax and, unlike the smallest float, is finite in fp16


@dataclass
class AttentionScope:
    """State shared by the attention modules of one graph while it is traced.

    mask: int64 [B, T], 1 at tokens of the source.
    past, cross: per decoder layer the cached keys and values [B, H, P or T, d]; None outside a decoder.
    present: the new caches of self-attention, per decoder layer.
    """

    mask: Tensor | None = None
    past: list[KeyValue] | None = None
    cross: list[KeyValue] | None = None
    present: dict[int, KeyValue] = field(default_factory=dict)


class PackedLinear(nn.Module):
    """Several linear layers of one input as one layer if they are of one kind, otherwise one by one.

    For low-rank layers only the half that reads the input is packed; the other half is a separate layer after
    it.

    sizes: outputs of the layers. factors: common factors of the input, if there are any. firsts: the layers
    that read it. packed: these as one, None if they are not of one kind. is_whole: whether that one layer
    computes all outputs.
    """

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self.sizes = [_out_features(m) for m in linears]
        self.parts = nn.ModuleList(linears)
        self.firsts = [m.down if isinstance(m, LowRankLinear) else m for m in linears]
        direct = self.firsts == list(linears)
        self.factors, self.firsts = _shared_factors(self.firsts)
        self._widths = [_out_features(m) for m in self.firsts]
        self.packed = _pack_linears(self.firsts)
        self.is_whole = self.packed is not None and direct

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map [..., K] to one [..., N] for each layer."""
        if self.packed is None:
            return tuple(m(x) for m in self.parts)
        found = torch.split(self.packed_output(x), self._widths, dim=-1)
        return tuple(
            m.up(y) if isinstance(m, LowRankLinear) else y for m, y in zip(self.parts, found, strict=True)
        )

    def packed_output(self, x: Tensor) -> Tensor:
        """Return the outputs of the packed layer, concatenated."""
        assert self.packed is not None
        out: Tensor = self.packed(x if self.factors is None else x * self.factors)
        return out


def _shared_factors(firsts: list[nn.Module]) -> tuple[nn.Parameter | None, list[nn.Module]]:
    """Return the common input factors of all of `firsts`, and the layers after them."""
    scaled = [m for m in firsts if isinstance(m, ScaledLinear)]
    if not scaled or len(scaled) < len(firsts):
        return None, firsts
    factors = scaled[0].factors
    if not all(m.factors.equal(factors) for m in scaled):
        return None, firsts
    return factors, [m.linear for m in scaled]


def _out_features(module: nn.Module) -> int:
    size = module.out_features
    assert isinstance(size, int)
    return size


def _pack_linears(linears: Sequence[nn.Module]) -> nn.Module | None:
    if all(type(m) is nn.Linear for m in linears):
        return _concat_linears([m for m in linears if isinstance(m, nn.Linear)])
    return concat_quantized(linears)


def _concat_linears(linears: list[nn.Linear]) -> nn.Linear:
    bias = any(m.bias is not None for m in linears)
    weight = torch.cat([m.weight.detach() for m in linears])
    new = nn.Linear(weight.shape[1], weight.shape[0], bias, device="meta")
    new.weight = nn.Parameter(weight, requires_grad=False)
    if bias:
        new.bias = nn.Parameter(_concat_biases(linears, weight), requires_grad=False)
    return new


def _concat_biases(linears: Sequence[nn.Linear], like: Tensor) -> Tensor:
    return torch.cat([like.new_zeros(m.out_features) if m.bias is None else m.bias.detach() for m in linears])


def full_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    heads: int,
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend over given keys and values; see `emit.multi_head_attention` for shapes."""
    if emit.export_target() == "ort-cpu":
        mask = None if mask is None else mask.to(torch.int32)
        return emit.multi_head_attention(query, key, value, mask, heads, scale, bias)
    key, value = (t if t.dim() == 4 else split_heads(t, heads) for t in (key, value))
    return _standard_attention(query, key, value, mask, heads, scale, bias)


def cached_step_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: KeyValue,
    heads: int,
    scale: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend over the past and the present token; see `emit.cached_attention` for shapes."""
    if emit.export_target() == "ort-cpu":
        return emit.cached_attention(query, key, value, past, heads, scale, bias)
    keys = torch.cat([past[0], split_heads(key, heads)], dim=2)
    values = torch.cat([past[1], split_heads(value, heads)], dim=2)
    return _standard_attention(query, keys, values, None, heads, scale, bias), keys, values


def _standard_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    heads: int,
    scale: float,
    bias: Tensor | None,
) -> Tensor:
    scores = (split_heads(query, heads) * scale) @ key.transpose(2, 3)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if mask is not None:
        scores = scores + ((1 - mask) * int(MASK_VALUE))[:, None, None, :].to(scores.dtype)
    out = torch.softmax(scores, dim=-1) @ value
    return out.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Turn [B, S, H * d] into [B, H, S, d]."""
    heads_first: Tensor = x.unflatten(2, (heads, x.shape[2] // heads)).transpose(1, 2)
    return heads_first
