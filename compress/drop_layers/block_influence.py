"""The importance of each layer: its block influence on hidden states, and the loss without it.

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

from smelt.compress.calibration.samples import model_outputs
from smelt.compress.calibration.sequential import forward_restorer
from smelt.compress.train.encoded_samples import TensorBatch
from smelt.families.family import Stack

# A layer: the name of its stack and its index there.
UnitId = tuple[str, int]
LayerCallback = Callable[[UnitId, Tensor, Any], None]


def block_influence(
    model: Any, stacks: Sequence[Stack], batches: Iterable[TensorBatch]
) -> dict[str, list[float]]:
    """Return the block influence of each layer by stack: 1 - mean over tokens of cos(h_in, h_out).

    h_in and h_out are the hidden states before and after a layer, float [B, S, D]: 0 if the layer changes
    nothing, 2 if it inverts every state. Source: ShortGPT, Men et al. 2024, arXiv:2403.03853,
    equation 1.

    Args:
        model: in eval mode.
        stacks: the model's stacks of layers.
        batches: inputs without padding, on the device of the model.
    """
    sums: defaultdict[UnitId, float] = defaultdict(float)
    tokens: Counter[UnitId] = Counter()

    def see(layer: UnitId, given: Tensor, result: Any) -> None:
        cosines = cosine_similarity(given.double(), _hidden_states(result).double(), dim=-1)
        sums[layer] += cosines.sum().item()
        tokens[layer] += cosines.numel()

    with _layer_hooks(model, stacks, see):
        for _ in model_outputs(model, batches):
            pass
    return {
        stack.name: [
            1 - sums[stack.name, number] / max(1, tokens[stack.name, number])
            for number in range(len(model.get_submodule(stack.module_path)))
        ]
        for stack in stacks
    }


@contextmanager
def without_layers(
    model: Any, stacks: Sequence[Stack], removed: Collection[UnitId], plain: set[nn.Module] | None = None
) -> Iterator[None]:
    """Disable the layers `removed` of `model` inside the context.

    They return their input states, and any other outputs of the layer, such as T5's relative position bias,
    which the first layer computes for all. So they are still computed, except those in `plain`.

    plain: layers known to return states only; others that do so are added.
    """
    plain = set() if plain is None else plain
    with ExitStack() as stack:
        for module, numbers in _modules_with_ids(model, stacks):
            if any(number in removed for number in numbers):
                stack.callback(forward_restorer(module))
                module.forward = _pass_through_forward(module, numbers, removed, plain)
        yield


def _pass_through_forward(
    module: Any, numbers: Sequence[UnitId], removed: Collection[UnitId], plain: set[nn.Module]
) -> Callable[..., Any]:
    """Return the layer's forward function, with its input states as output where the layer is removed."""
    forward, calls = module.forward, cycle(numbers)

    def call(states: Tensor, *args: Any, **kwargs: Any) -> Any:
        away = next(calls) in removed
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


def drop_units_by_loss(
    num_kept: dict[str, int],
    num_present: dict[str, int],
    fixed: Collection[UnitId],
    loss_without: Callable[[frozenset[UnitId], UnitId], float],
    is_last: Callable[[UnitId, Collection[UnitId]], bool] = lambda layer, gone: False,
) -> tuple[list[UnitId], list[float]]:
    """Remove layers one by one, each time the one with the smallest loss without it.

    Args:
        num_kept: number of layers to keep, by stack.
        num_present: number of layers, by stack.
        fixed: layers that are always kept.
        loss_without: returns the loss without some layers, of which the second argument is on trial.
        is_last: returns whether a layer must be kept once others are removed.

    Returns:
        The removed layers in the order of removal, and the loss after each.
    """
    gone: list[UnitId] = []
    losses: list[float] = []
    while True:
        left = {name: num_present[name] - sum(stack == name for stack, _ in gone) for name in num_present}
        open_ones = [
            (name, number)
            for name, count in num_present.items()
            if left[name] > num_kept[name]
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
def _layer_hooks(model: Any, stacks: Sequence[Stack], callback: LayerCallback) -> Iterator[None]:
    """Call `callback` with each layer, its input states and its result.

    A module that is used at several positions of a stack is called once for each, in their order.
    """
    handles = [
        module.register_forward_hook(_layer_hook(numbers, callback))
        for module, numbers in _modules_with_ids(model, stacks)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _modules_with_ids(model: Any, stacks: Sequence[Stack]) -> Iterator[tuple[nn.Module, list[UnitId]]]:
    """Yield the modules of the stacks, each once, with all its positions."""
    for stack in stacks:
        places: dict[nn.Module, list[UnitId]] = {}
        for number, module in enumerate(model.get_submodule(stack.module_path)):
            places.setdefault(module, []).append((stack.name, number))
        yield from places.items()


def _layer_hook(
    numbers: list[UnitId], callback: LayerCallback
) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    calls = cycle(numbers)

    def hook(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        callback(next(calls), given[0], result)

    return hook


def _hidden_states(result: Any) -> Tensor:
    states: Tensor = result[0] if isinstance(result, tuple) else result
    return states
