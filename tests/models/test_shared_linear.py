import torch
from torch import nn

from smelt.models.edits import apply_edits
from smelt.models.layers import LowRankLinear, SharedLinear, component_layers


def test_output_is_shared_plus_difference_with_one_bias():
    torch.manual_seed(0)
    layer = SharedLinear(12, 8, 3)
    assert (layer.in_features, layer.out_features, layer.rank) == (12, 8, 3)
    weight = layer.shared.weight + layer.difference.up.weight @ layer.difference.down.weight
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(layer(x), x @ weight.T + layer.difference.up.bias)
    assert [n for n, _ in layer.named_parameters() if "bias" in n] == ["difference.up.bias"]
    assert [n for n, _ in SharedLinear(12, 8, 3, bias=False).named_parameters() if "bias" in n] == []


def test_edits_create_shared_linear_layers():
    model = nn.ModuleDict({"a": nn.Linear(12, 8), "b": nn.Linear(12, 8)}).to("meta")
    edits = [{"op": "difference", "module": name, "rank": rank} for name, rank in (("a", 3), ("b", 2))]
    apply_edits(model, [*edits, {"op": "share", "module": "b.shared", "with": "a.shared"}])
    assert model["a"].shared is model["b"].shared
    assert (model["a"].rank, model["b"].rank) == (3, 2)
    assert all(p.is_meta for p in model.parameters())


def test_component_layers_are_listed_by_name():
    layer = SharedLinear(12, 8, 3)
    assert list(component_layers(layer, "x")) == ["x.shared", "x.difference.down", "x.difference.up"]
    layer.shared = LowRankLinear(12, 8, 4, bias=False)
    assert list(component_layers(layer)) == ["shared.down", "shared.up", "difference.down", "difference.up"]
    assert component_layers(layer.shared.up, "y") == {"y": layer.shared.up}
