"""What is held while the layers of a block are made sparse."""

import weakref

import pytest
import torch
from torch import nn

from smelt.compress.sparsify.methods.registry import SPARSITY_METHODS
from smelt.compress.sparsify.pattern import SparsityPattern
from smelt.compress.sparsify.sparsifier import Sparsifier
from smelt.models.edits import mark_masked


def test_second_moment_is_freed_after_its_layer():
    """Of a wide block they are larger than the block: those of layers that are done would lie there for
    nothing while the widest is inverted."""
    alive = []

    def method(layer, pattern, draw):
        assert not any(other() is not None for other in alive)
        alive.append(weakref.ref(layer.statistics))
        return layer.weight.masked_fill(layer.weight < 0, 0.0)

    layers = {name: nn.Linear(8, 4) for name in "abc"}
    sparsifier = Sparsifier(
        nn.ModuleDict(layers),
        _Method(method),
        SparsityPattern(sparsity=0.5),
        torch.Generator().manual_seed(0),
    )
    sparsifier.sparsify(layers, lambda wanted, see: [see(name, torch.ones(3, 8)) for name in wanted])
    assert len(alive) == 3


class _Method:
    needs = "moments"

    def __init__(self, method):
        self._method = method

    def load(self):
        return self._method


@pytest.mark.parametrize("method", SPARSITY_METHODS.values(), ids=SPARSITY_METHODS)
def test_existing_zeros_count_in_a_sparser_pattern(method):
    """As many as the gradual schedule asks for; others may only be set to zero behind them."""
    layer, draw = nn.Linear(256, 16), torch.Generator().manual_seed(0)  # two blocks of SparseGPT's columns
    inputs = torch.randn(400, 256, generator=draw) @ torch.randn(256, 256, generator=draw)

    def sparsify(sparsity):
        work = Sparsifier(nn.Module(), method, SparsityPattern(sparsity), draw)
        work.sparsify({"layer": layer}, lambda layers, see: see("layer", inputs))
        return layer.weight.detach() == 0

    first = sparsify(0.25)
    mark_masked(layer)
    second = sparsify(0.5)
    assert (int(first.sum()), int(second.sum())) == (1024, 2048)
    assert bool((first <= second).all())
