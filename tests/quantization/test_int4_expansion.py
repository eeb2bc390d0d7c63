import numpy as np
import torch

from smelt.quantization.groupwise import pack_codes, unpack_nibbles
from smelt.quantization.schemes.affine import int4_expansion_table, shift_zero_points


def test_byte_of_four_2_bit_values_becomes_two_bytes_of_nibbles():
    table = int4_expansion_table([6, 7, 8, 9])
    codes = torch.arange(256, dtype=torch.uint8).reshape(64, 4) % 4
    packed = pack_codes(codes, 2)[:, 0].numpy()
    assert unpack_nibbles(torch.from_numpy(table[packed])).equal(codes + 6)


def test_byte_of_eight_bits_becomes_four_bytes_of_nibbles():
    table = int4_expansion_table([4, 8])
    assert table.shape == (256, 4)
    assert table[0b10000001].tolist() == [0x48, 0x44, 0x44, 0x84]


def test_zero_points_are_shifted_with_the_weights():
    zeros = torch.tensor([[0, 3, 1]], dtype=torch.uint8)
    assert shift_zero_points(zeros, 6).numpy().tolist() == [[0x96, 0x07]]
    assert np.uint8 == shift_zero_points(zeros, 6).numpy().dtype
