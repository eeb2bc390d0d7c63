import pytest
import torch

from smelt.quantization.groupwise import fake_quantize_blocks, num_groups, split_into_groups

pytestmark = pytest.mark.quick


def test_last_group_is_padded_with_zeros():
    weight = torch.arange(10.0).reshape(2, 5)
    assert split_into_groups(weight, 3).tolist() == [[[0, 1, 2], [3, 4, 0]], [[5, 6, 7], [8, 9, 0]]]


@pytest.mark.parametrize("width", [1, 63, 64, 65])
def test_number_of_groups_equals_the_count(width):
    assert split_into_groups(torch.zeros(2, width), 64).shape[1] == num_groups(width, 64)


def test_int8_blocks_equal_manual_values():
    x = torch.tensor([[1.27, -0.633, 0.0, 254.0, 1.0, 0.0]])
    # blocks of 3: scales 0.01 and 2; 0.633 rounds to 63, 0.5 to the even 0
    assert fake_quantize_blocks(x, 3).allclose(torch.tensor([[1.27, -0.63, 0.0, 254.0, 0.0, 0.0]]))
    assert fake_quantize_blocks(torch.zeros(2, 5), 3).equal(torch.zeros(2, 5))
