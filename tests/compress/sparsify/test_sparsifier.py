"""What is held while the layers of a block are made sparse."""

import weakref

import torch
from torch import nn

from smelt.compress.sparsify.methods import Sparsifier
from smelt.compress.sparsify.settings import SparsityPattern


def test_a_second_moment_goes_when_its_layer_is_done():
    """Of a wide block they are larger than the block: those of layers that are done would lie there for
    nothing while the widest is inverted."""
    alive = []

    def method(weight, found, pattern, draw):
        assert not any(other() is not None for other in alive)
        alive.append(weakref.ref(found))
        return weight.masked_fill(weight < 0, 0.0)

    layers = {name: nn.Linear(8, 4) for name in "abc"}
    found = Sparsifier(
        nn.ModuleDict(layers),
        _Method(method),
        SparsityPattern(sparsity=0.5),
        torch.Generator().manual_seed(0),
    )
    found.sparsify(layers, lambda wanted, see: [see(name, torch.ones(3, 8)) for name in wanted])
    assert len(alive) == 3


class _Method:
    statistics = "moments"

    def __init__(self, method):
        self._method = method

    def __call__(self, *given):
        return self._method(*given)
