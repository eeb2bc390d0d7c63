"""Codes of fewer than eight bits in bytes, the first code in the lowest bits: as MatMulNBits reads them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def pack_nibbles(codes: Tensor) -> Tensor:
    """Put two codes into one byte along the last axis: uint8 [..., n] -> uint8 [..., ceil(n / 2)]."""
    codes = F.pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the codes of `pack_nibbles`, uint8 [..., 2 n]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def nibbles_as_floats(packed: Tensor) -> Tensor:
    """Return the codes of `pack_nibbles` as float32 [..., 2 n], by operators that leave torch well.

    torch 2.13's exporter makes an int8 of a shifted uint8, which ONNX Runtime refuses.
    """
    both = packed.float()
    high = torch.floor(both / 16)
    return torch.stack([both - 16 * high, high], dim=-1).flatten(-2)


def pack_bits(bits: Tensor) -> Tensor:
    """Put eight bits into one byte along the last axis: bool [..., 8 n] -> uint8 [..., n]."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    eights: Tensor = bits.to(torch.uint8).unflatten(-1, (-1, 8))
    return (eights << places).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """Return the bits of `pack_bits`, bool [..., 8 n]."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & 1).bool().flatten(-2)
