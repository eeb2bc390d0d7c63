"""What each layer of a stack does: how far it turns its states, and what the loss is without it.

Shapes: B = batch, S = tokens, D = width of the hidden states.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from smelt.compress.calibration.rows import outputs
from smelt.compress.calibration.walk import restored
from smelt.compress.train.data import TensorBatch
from smelt.families.family import Stack

# A layer: the stack's name and its number in it.
Layer = tuple[str, int]
See = Callable[[Layer, Tensor, Any], None]


def block_influence(
    model: Any, stacks: Sequence[Stack], batches: Iterable[TensorBatch]
) -> dict[str, list[float]]:
    """Return by stack the block influence of each layer: 1 - mean over tokens of cos(h_in, h_out).

    h_in and h_out are the hidden states that a layer is given and gives, float [B, S, D]: 0 where a layer
    does nothing, 2 where it turns every state around. Source: ShortGPT, Men et al. 2024, arXiv:2403.03853,
    equation 1.

    Args:
        model: in eval mode.
        stacks: of its family.
        batches: inputs without padding, on the device of the model.
    """
    sums: defaultdict[Layer, float] = defaultdict(float)
    tokens: Counter[Layer] = Counter()

    def see(layer: Layer, given: Tensor, result: Any) -> None:
        cosines = cosine_similarity(given.double(), _states(result).double(), dim=-1)
        sums[layer] += cosines.sum().item()
        tokens[layer] += cosines.numel()

    with _watched(model, stacks, see):
        for _ in outputs(model, batches):
            pass
    return {
        stack.name: [
            1 - sums[stack.name, number] / max(1, tokens[stack.name, number])
            for number in range(len(model.get_submodule(stack.place)))
        ]
        for stack in stacks
    }


@contextmanager
def without(
    model: Any, stacks: Sequence[Stack], gone: Collection[Layer], plain: set[nn.Module] | None = None
) -> Iterator[None]:
    """Let `model` compute meanwhile as if the layers `gone` were not there.

    They hand on the states that they were given, and with them whatever else a layer gives, such as T5's bias
    by distance, which its first layer makes for all. For that they are computed, but for those of `plain`.

    plain: the layers that are known to give nothing but states; the others of these are added.
    """
    plain = set() if plain is None else plain
    with ExitStack() as stack:
        for module, numbers in _numbered(model, stacks):
            if any(number in gone for number in numbers):
                stack.callback(restored(module))
                module.forward = _handing_on(module, numbers, gone, plain)
        yield


def _handing_on(
    module: Any, numbers: Sequence[Layer], gone: Collection[Layer], plain: set[nn.Module]
) -> Callable[..., Any]:
    """Return what computes what the layer does, but hands on what it was given where it is gone."""
    forward, calls = module.forward, cycle(numbers)

    def call(states: Tensor, *args: Any, **kwargs: Any) -> Any:
        away = next(calls) in gone
        if away and module in plain:
            return states
        result = forward(states, *args, **kwargs)
        if not away:
            return result
        if isinstance(result, tuple):
            return (states, *result[1:])
        plain.add(module)
        return states

    return call


def drop_by_loss(
    stay: dict[str, int],
    there: dict[str, int],
    fixed: Collection[Layer],
    loss_without: Callable[[frozenset[Layer], Layer], float],
    is_last: Callable[[Layer, Collection[Layer]], bool] = lambda layer, gone: False,
) -> tuple[list[Layer], list[float]]:
    """Drop layers one by one, each time the one without which the loss is smallest.

    Args:
        stay: by stack how many layers stay.
        there: by stack how many there are.
        fixed: layers that stay in any case.
        loss_without: the loss of the model without some layers, of which the second is tried now.
        is_last: says whether a layer has to stay once others are gone.

    Returns:
        The layers that go, in the order in which they went, and the loss after each.
    """
    gone: list[Layer] = []
    losses: list[float] = []
    while True:
        left = {name: there[name] - sum(stack == name for stack, _ in gone) for name in there}
        open_ones = [
            (name, number)
            for name, count in there.items()
            if left[name] > stay[name]
            for number in range(count)
            if (name, number) not in gone
            and (name, number) not in fixed
            and not is_last((name, number), gone)
        ]
        if not open_ones:
            return gone, losses
        tried = {layer: loss_without(frozenset([*gone, layer]), layer) for layer in open_ones}
        best = min(tried, key=lambda layer: tried[layer])
        gone.append(best)
        losses.append(tried[best])


@contextmanager
def _watched(model: Any, stacks: Sequence[Stack], see: See) -> Iterator[None]:
    """Call `see` with each layer, the states that it was given and its result.

    A module that stands in several places of a stack is called once for each, in their order.
    """
    handles = [
        module.register_forward_hook(_hook(numbers, see)) for module, numbers in _numbered(model, stacks)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _numbered(model: Any, stacks: Sequence[Stack]) -> Iterator[tuple[nn.Module, list[Layer]]]:
    """Yield the modules of the stacks, each once, with the places where it stands."""
    for stack in stacks:
        places: dict[nn.Module, list[Layer]] = {}
        for number, module in enumerate(model.get_submodule(stack.place)):
            places.setdefault(module, []).append((stack.name, number))
        yield from places.items()


def _hook(numbers: list[Layer], see: See) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    calls = cycle(numbers)

    def hook(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        see(next(calls), given[0], result)

    return hook


def _states(result: Any) -> Tensor:
    states: Tensor = result[0] if isinstance(result, tuple) else result
    return states
