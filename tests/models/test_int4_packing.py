"""Packed matrices, unpacked as the loops of AutoGPTQ's and AutoAWQ's own torch code do."""

import pytest
import torch

from smelt.models.int4_packing import UnpackedInt4, pack_awq, pack_gptq, unpack_awq, unpack_gptq

pytestmark = pytest.mark.quick
OUTPUTS, INPUTS, GROUP = 16, 64, 32


def random_matrix(lowest_zero: int) -> UnpackedInt4:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (OUTPUTS, INPUTS), generator=draw, dtype=torch.uint8)
    zeros = torch.randint(lowest_zero, 16, (OUTPUTS, INPUTS // GROUP), generator=draw, dtype=torch.int16)
    scales = torch.randn(OUTPUTS, INPUTS // GROUP, generator=draw).half()
    return UnpackedInt4(codes, zeros, scales)


def values(matrix: UnpackedInt4) -> torch.Tensor:
    groups = matrix.codes.float().unflatten(1, (-1, GROUP)) - matrix.zeros.float()[..., None]
    return (groups * matrix.scales.float()[..., None]).flatten(1)


def gptq_values(packed: dict[str, torch.Tensor], offset: int) -> torch.Tensor:
    """AutoGPTQ, nn_modules/qlinear/qlinear_cuda_old.py: shifts of `wf`, then scales[g] * (w - zeros[g])."""
    wf = torch.tensor([0, 4, 8, 12, 16, 20, 24, 28], dtype=torch.int32)
    zeros = torch.bitwise_right_shift(packed["qzeros"].unsqueeze(2).expand(-1, -1, 8), wf[None, None])
    zeros = (torch.bitwise_and(zeros, 15) + offset).reshape(packed["scales"].shape)
    weight = torch.bitwise_right_shift(packed["qweight"].unsqueeze(1).expand(-1, 8, -1), wf[None, :, None])
    weight = torch.bitwise_and(weight, 15).reshape(-1, OUTPUTS)
    index = packed["g_idx"].long()
    return (packed["scales"].float()[index] * (weight - zeros[index])).t()


def awq_values(packed: dict[str, torch.Tensor]) -> torch.Tensor:
    """AutoAWQ, utils/packing_utils.py: unpack in order, then undo the order by AWQ_REVERSE_ORDER."""
    shifts, reverse = torch.arange(0, 32, 4), torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])

    def unpacked(words: torch.Tensor) -> torch.Tensor:
        parts = torch.bitwise_right_shift(words[:, :, None], shifts[None, None, :]).to(torch.int8)
        columns = torch.arange(parts.shape[1] * 8).view(-1, 8)[:, reverse].flatten()
        return torch.bitwise_and(parts.view(len(words), -1)[:, columns], 15)

    scales, zeros = (
        t.repeat_interleave(GROUP, dim=0) for t in (packed["scales"], unpacked(packed["qzeros"]))
    )
    return ((unpacked(packed["qweight"]) - zeros) * scales.float()).t()


@pytest.mark.parametrize("offset", [0, 1])
def test_gptq_matrix_has_values_of_autogptq(offset):
    matrix = random_matrix(lowest_zero=offset)
    packed = pack_gptq(matrix, offset)
    assert packed["qweight"].dtype == packed["qzeros"].dtype == torch.int32
    assert torch.equal(gptq_values(packed, offset), values(matrix))
    back = unpack_gptq(packed["qweight"], packed["qzeros"], packed["scales"], offset)
    assert all(torch.equal(one, other) for one, other in zip(back, matrix, strict=True))


def test_awq_matrix_has_values_of_autoawq():
    matrix = random_matrix(lowest_zero=0)
    packed = pack_awq(matrix)
    assert torch.equal(awq_values(packed), values(matrix))
    assert all(torch.equal(one, other) for one, other in zip(unpack_awq(**packed), matrix, strict=True))
