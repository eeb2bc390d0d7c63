"""A layer that is the sum of two."""

import torch
from torch import nn

from smelt.core.errors import InputError
from smelt.models.edits import apply_edits
from smelt.quantization.layers import QuantizedLinear, SplitLinear, make_split_linear
from tests.support.expected_errors import raises_code


def test_split_layers_sum_to_the_original_with_one_bias():
    torch.manual_seed(0)
    split = make_split_linear(nn.Linear(6, 4))
    assert (split.in_features, split.out_features, split.weight) == (6, 4, None)
    x = torch.randn(3, 6)
    expected = x @ (split.first.weight + split.second.weight).T + split.first.bias
    assert split(x).allclose(expected, atol=1e-6)
    assert split.second.bias is None
    assert make_split_linear(nn.Linear(6, 4, bias=False)).first.bias is None


def test_edit_creates_two_quantizable_layers():
    model = nn.Module()
    with torch.device("meta"):
        model.a, model.b = nn.Linear(32, 8), nn.Embedding(4, 4)
    codes = {"op": "quantize", "scheme": "binary", "group_size": 32, "accuracy_level": 4}
    codes |= {"activation_bits": 8}
    apply_edits(model, [{"op": "split", "module": "a"}, codes | {"module": "a.second"}])
    assert isinstance(model.a, SplitLinear)
    assert isinstance(model.a.second, QuantizedLinear)
    assert model.a.first.weight.is_meta
    with raises_code("does-not-fit-model", InputError) as caught:
        apply_edits(model, [{"op": "split", "module": "b"}])
    assert isinstance(caught.value.__cause__, TypeError)
