"""The casts that torch puts into a graph are there although nothing is computed to find them."""

import graph_outline
import pytest
import torch
from torch import nn
from torch.onnx._internal.fx.passes import type_promotion

from smelt.export.graphs.type_promotion import fast_type_promotion

TORCHS = type_promotion._TypePromotionInterpreter.run_node


class Mixed(nn.Module):
    """Operators of two types, of a number and a tensor, and one behind another that got a cast."""

    def forward(self, x, mask):
        """x float32 [B, S]; mask int64 [B, S]."""
        scaled = x * mask
        halves = mask / 2
        chosen = torch.where(mask > 0, scaled + halves, 0)
        return torch.maximum(chosen, mask), torch.pow(mask, 2) + 0.5, x.half() + x, x.tanh().relu()


INPUTS = (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64))


def exported():
    with torch.no_grad():
        return torch.onnx.export(
            Mixed().eval(),
            INPUTS,
            None,
            dynamo=True,
            opset_version=20,
            verbose=False,
            dynamic_shapes=({0: "batch"}, {0: "batch"}),
            output_names=list("abcd"),
        ).model_proto


@pytest.fixture
def computed(monkeypatch):
    """The operators that are computed to find casts."""
    seen = []
    compute = torch.fx.Interpreter.run_node

    def spy(self, node):
        if isinstance(self, type_promotion._TypePromotionInterpreter) and node.op == "call_function":
            seen.append(str(node.target))
        return compute(self, node)

    monkeypatch.setattr(torch.fx.Interpreter, "run_node", spy)
    return seen


def test_the_graph_is_torchs_and_only_what_got_a_cast_is_computed(computed):
    torchs = exported()
    assert "aten.tanh.default" in computed
    computed.clear()
    with fast_type_promotion():
        ours = exported()
    assert list(graph_outline.outline_lines(ours)) == list(graph_outline.outline_lines(torchs))
    assert [node.op_type for node in ours.graph.node].count("Cast") >= 3
    assert "prims.convert_element_type.default" in computed
    assert "aten.tanh.default" not in computed


def test_torch_is_as_it_was_afterwards():
    with pytest.raises(ZeroDivisionError), fast_type_promotion():
        1 / (type_promotion._TypePromotionInterpreter.run_node is TORCHS)
    assert type_promotion._TypePromotionInterpreter.run_node is TORCHS


@pytest.mark.parametrize("name", ["_TypePromotionInterpreter", "get_type_promotion_rule"])
def test_a_torch_that_casts_elsewhere_exports_as_it_does(name, monkeypatch):
    monkeypatch.delattr(type_promotion, name)
    with fast_type_promotion():
        assert type_promotion.InsertTypePromotion
