import pytest
import torch
from torch import nn

from smelt.compress.quantize.plan_layers import quantize_module
from smelt.core.errors import InputError
from smelt.models.edits import apply_edits
from smelt.models.layers import LowRankCorrectedLinear
from tests.support.expected_errors import raises_code


@pytest.fixture
def layer():
    torch.manual_seed(0)
    module = LowRankCorrectedLinear(quantize_module(nn.Linear(96, 24), "int4"), 3)
    assert (module.in_features, module.out_features, module.adapter.rank) == (96, 24, 3)
    return module


def test_output_is_the_sum_of_quantized_layer_and_adapter_with_one_bias(layer):
    x = torch.randn(2, 5, 96)
    weight = layer.adapter.up.weight @ layer.adapter.down.weight
    with torch.inference_mode():
        assert layer(x).allclose(layer.coded(x) + x @ weight.T, atol=1e-5)
    assert [name for name, _ in layer.named_parameters() if "bias" in name] == ["coded.bias"]


def test_edit_creates_the_adapter_and_a_second_edit_changes_its_rank(layer):
    model = nn.ModuleDict({"a": layer.coded})
    edit = {"op": "adapter", "module": "a", "rank": 3}
    apply_edits(model, [edit, edit | {"rank": 5}])
    assert model["a"].coded is layer.coded
    assert model["a"].adapter.rank == 5


@pytest.mark.parametrize(("module", "rank", "cause"), [
    ("a", 0, ValueError), ("a", 25, ValueError), ("b", 3, TypeError),
])  # fmt: skip
def test_invalid_edit_is_refused(layer, module, rank, cause):
    model = nn.ModuleDict({"a": layer.coded, "b": nn.Linear(4, 4)})
    with raises_code("does-not-fit-model", InputError) as caught:
        apply_edits(model, [{"op": "adapter", "module": module, "rank": rank}])
    assert type(caught.value.__cause__) is cause
