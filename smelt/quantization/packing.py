"""Packs codes of fewer than eight bits into bytes, the first code in the lowest bits, as in MatMulNBits.

bitsandbytes, and so MatMulBnb4, stores the first of two in the highest ones (`high_first`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def pack_nibbles(codes: Tensor, high_first: bool = False) -> Tensor:
    """Pack two codes into one byte along the last axis: uint8 [..., n] -> uint8 [..., ceil(n / 2)]."""
    codes = F.pad(codes, (0, codes.shape[-1] % 2))
    low, high = (1, 0) if high_first else (0, 1)
    return codes[..., low::2] | (codes[..., high::2] << 4)


def unpack_nibbles(packed: Tensor, high_first: bool = False) -> Tensor:
    """Return the codes of `pack_nibbles`, uint8 [..., 2 n]."""
    both = [packed & 15, packed >> 4]
    return torch.stack(both[::-1] if high_first else both, dim=-1).flatten(-2)


def unpack_nibbles_float(packed: Tensor, high_first: bool = False) -> Tensor:
    """Return the codes of `pack_nibbles` as float32 [..., 2 n], with operators that can be exported.

    torch 2.13's exporter turns a shifted uint8 into an int8, which ONNX Runtime rejects.
    """
    whole = packed.float()
    high = torch.floor(whole / 16)
    both = [whole - 16 * high, high]
    return torch.stack(both[::-1] if high_first else both, dim=-1).flatten(-2)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack eight bits into one byte along the last axis: bool [..., 8 n] -> uint8 [..., n]."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    eights: Tensor = bits.to(torch.uint8).unflatten(-1, (-1, 8))
    return (eights << places).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """Return the bits of `pack_bits`, bool [..., 8 n]."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & 1).bool().flatten(-2)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack as many codes of `bits` (1, 2, 4 or 8) into a byte as fit: uint8 [..., n] -> uint8 [..., m]."""
    per = 8 // bits
    if per == 1:
        return codes
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    full: Tensor = F.pad(codes, (0, -codes.shape[-1] % per)).unflatten(-1, (-1, per))
    return (full << places).sum(dim=-1, dtype=torch.uint8)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of `pack_codes`, uint8 [..., m * 8 / bits]."""
    if bits == 8:
        return packed
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = (packed.unsqueeze(-1) >> places) & (2**bits - 1)
    return codes.flatten(-2)


def pack_base_n(codes: Tensor, base: int, count: int) -> Tensor:
    """Pack `count` codes below `base` into a byte, the first the lowest digit: uint8 [..., n] -> [..., m]."""
    places = base ** torch.arange(count, dtype=torch.uint8, device=codes.device)
    full: Tensor = F.pad(codes, (0, -codes.shape[-1] % count)).unflatten(-1, (-1, count))
    return (full * places).sum(dim=-1, dtype=torch.uint8)


def unpack_base_n_float(packed: Tensor, base: int, count: int) -> Tensor:
    """Return the `count` digits of each byte in `base`, the lowest first, with exportable operators.

    They are the codes of `pack_base_n`; with base 2^b and 8 / b digits also those of `pack_codes`.

    Returns:
        float32 [..., count * n] for uint8 [..., n].
    """
    left = packed.float()
    digits = []
    for _ in range(count - 1):
        higher = torch.floor(left / base)
        digits.append(left - base * higher)
        left = higher
    return torch.stack([*digits, left], dim=-1).flatten(-2)
