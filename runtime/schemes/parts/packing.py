"""Codes of fewer than eight bits in bytes, the first code in the lowest bits: as MatMulNBits reads them.

bitsandbytes, and so MatMulBnb4, has the first of two in the highest ones (`high_first`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def pack_nibbles(codes: Tensor, high_first: bool = False) -> Tensor:
    """Put two codes into one byte along the last axis: uint8 [..., n] -> uint8 [..., ceil(n / 2)]."""
    codes = F.pad(codes, (0, codes.shape[-1] % 2))
    low, high = (1, 0) if high_first else (0, 1)
    return codes[..., low::2] | (codes[..., high::2] << 4)


def unpack_nibbles(packed: Tensor, high_first: bool = False) -> Tensor:
    """Return the codes of `pack_nibbles`, uint8 [..., 2 n]."""
    both = [packed & 15, packed >> 4]
    return torch.stack(both[::-1] if high_first else both, dim=-1).flatten(-2)


def nibbles_as_floats(packed: Tensor, high_first: bool = False) -> Tensor:
    """Return the codes of `pack_nibbles` as float32 [..., 2 n], by operators that leave torch well.

    torch 2.13's exporter makes an int8 of a shifted uint8, which ONNX Runtime refuses.
    """
    whole = packed.float()
    high = torch.floor(whole / 16)
    both = [whole - 16 * high, high]
    return torch.stack(both[::-1] if high_first else both, dim=-1).flatten(-2)


def pack_bits(bits: Tensor) -> Tensor:
    """Put eight bits into one byte along the last axis: bool [..., 8 n] -> uint8 [..., n]."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    eights: Tensor = bits.to(torch.uint8).unflatten(-1, (-1, 8))
    return (eights << places).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """Return the bits of `pack_bits`, bool [..., 8 n]."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & 1).bool().flatten(-2)
