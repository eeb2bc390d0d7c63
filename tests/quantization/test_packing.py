import itertools

import pytest
import torch

from smelt.quantization.groupwise import (
    pack_base_n,
    pack_bits,
    pack_codes,
    pack_nibbles,
    unpack_base_n_float,
    unpack_bits,
    unpack_codes,
    unpack_nibbles,
    unpack_nibbles_float,
)

pytestmark = pytest.mark.quick


def test_first_of_two_values_is_in_the_low_half_of_a_byte():
    codes = torch.tensor([[1, 2, 15, 0, 7]], dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.tolist() == [[0x21, 0x0F, 0x07]]
    assert unpack_nibbles(packed)[:, :5].equal(codes)


def test_all_4_bit_values_survive_packing():
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16) % 16
    assert unpack_nibbles(pack_nibbles(codes)).equal(codes)
    assert unpack_nibbles_float(pack_nibbles(codes)).equal(codes.float())


def test_bit_i_of_byte_j_is_weight_8j_plus_i():
    bits = torch.zeros(1, 16, dtype=torch.bool)
    bits[0, [0, 3, 15]] = True
    assert pack_bits(bits).tolist() == [[0b00001001, 0b10000000]]


def test_all_bytes_survive_packing():
    bits = torch.tensor(list(itertools.product([False, True], repeat=8)))
    assert unpack_bits(pack_bits(bits)).equal(bits)
    assert sorted(pack_bits(bits).flatten().tolist()) == list(range(256))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_values_of_any_width_survive_packing_with_the_first_in_the_lowest_bits(bits):
    torch.manual_seed(0)
    codes = torch.randint(0, 2**bits, (3, 21), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, -(-21 * bits // 8))
    assert unpack_codes(packed, bits)[:, :21].equal(codes)
    assert unpack_base_n_float(packed, 2**bits, 8 // bits)[:, :21].equal(codes.float())
    assert packed[0, 0] == sum(int(codes[0, i]) << bits * i for i in range(8 // bits))


def test_five_ternary_digits_are_packed_in_a_byte_lowest_first():
    digits = torch.tensor(list(itertools.product(range(3), repeat=5)), dtype=torch.uint8)
    packed = pack_base_n(digits, 3, 5)
    assert sorted(packed.flatten().tolist()) == list(range(243))
    assert packed[1].tolist() == [81]
    assert unpack_base_n_float(packed, 3, 5).equal(digits.float())
