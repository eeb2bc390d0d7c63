"""Select the layers to keep by their importance: block influence on hidden states, or the loss without them.

`AblationLosses` measures the loss of a model with some of its layers, or parts of layers, removed, for one
choice after another.

Shapes: B = batch, S = tokens, D = width of the hidden states.
"""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from smelt.calibration.prefix_cache import PrefixCachedModel
from smelt.calibration.run_blocks import run_blocks
from smelt.calibration.samples import CalibrationSamples, load_calibration_samples, model_outputs
from smelt.calibration.sequential import forward_restorer
from smelt.compress.drop_layers.settings import DropLayersSettings
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.near_ties import first_within_tolerance
from smelt.data.splits import missing_labels_errors
from smelt.models.families.layout import Stack
from smelt.models.families.registry import Block, family_of, skipped_parts
from smelt.models.streamed_model import StreamedModel
from smelt.runtimes.device import torch_device
from smelt.stage import Context
from smelt.tasks.samples import TensorBatch
from smelt.training.extension import mean_loss
from smelt.training.losses import label_objective

# A layer: the name of its stack and its index there.
UnitId = tuple[str, int]
LayerCallback = Callable[[UnitId, Tensor, Any], None]


Unit = TypeVar("Unit")


class InfluenceSums(Generic[Unit]):
    """Sums of cosines between the hidden states before and after layers or parts of them."""

    def __init__(self) -> None:
        self._sums: defaultdict[Unit, float] = defaultdict(float)
        self._tokens: Counter[Unit] = Counter()

    def add(self, unit: Unit, before: Tensor, after: Tensor) -> None:
        """Add the tokens of a batch, float [B, S, D]."""
        cosines = cosine_similarity(before.double(), after.double(), dim=-1)
        self._sums[unit] += cosines.sum().item()
        self._tokens[unit] += cosines.numel()

    def influence(self, unit: Unit) -> float:
        """Return 1 - the mean cosine."""
        return 1 - self._sums[unit] / max(1, self._tokens[unit])


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
    sums = InfluenceSums[UnitId]()
    with _layer_hooks(model, stacks, lambda layer, x, result: sums.add(layer, x, _hidden_states(result))):
        for _ in model_outputs(model, batches):
            pass
    return {
        stack.name: [sums.influence((stack.name, index)) for index in range(len(stack.modules(model)))]
        for stack in stacks
    }


def streamed_block_influence(
    streamed: StreamedModel, stacks: Sequence[Stack], samples: CalibrationSamples, ctx: Context
) -> dict[str, list[float]]:
    """Return the same as `block_influence` for a model of which one block is in memory at a time."""
    sums = InfluenceSums[UnitId]()

    def see(block: Block, x: Tensor, result: Any) -> None:
        sums.add((block.stack.name, block.index), x, _hidden_states(result))

    counts = Counter(block.stack.name for block in run_streamed(streamed, samples, ctx, see))
    return {s.name: [sums.influence((s.name, index)) for index in range(counts[s.name])] for s in stacks}


def run_streamed(
    streamed: StreamedModel,
    samples: CalibrationSamples,
    ctx: Context,
    see: Callable[[Block, Tensor, Any], None] | None = None,
) -> list[Block]:
    """Run the model block by block; return the blocks. see: gets the block, its input and its output."""
    blocks = []
    for step in run_blocks(streamed.model, samples, ctx, stage="drop-layers", offloaded=streamed, save=False):
        step.run(None if see is None else partial(see, step.block))
        blocks.append(step.block)
    return blocks


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
        for module, unit_ids in _modules_with_ids(model, stacks):
            if any(unit_id in removed for unit_id in unit_ids):
                stack.callback(forward_restorer(module))
                module.forward = _pass_through_forward(module, unit_ids, removed, plain)
        yield


def _pass_through_forward(
    module: Any, numbers: Sequence[UnitId], removed: Collection[UnitId], plain: set[nn.Module]
) -> Callable[..., Any]:
    """Return the layer's forward function, with its input states as output where the layer is removed."""
    forward, calls = module.forward, cycle(numbers)

    def call(states: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_removed = next(calls) in removed
        if is_removed and module in plain:
            return states
        result = forward(states, *args, **kwargs)
        if not is_removed:
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
    is_last: Callable[[UnitId, Collection[UnitId]], bool] = lambda layer, removed: False,
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
    removed: list[UnitId] = []
    losses: list[float] = []
    while True:
        num_left = {
            name: num_present[name] - sum(stack == name for stack, _ in removed) for name in num_present
        }
        candidates = [
            (name, number)
            for name, count in num_present.items()
            if num_left[name] > num_kept[name]
            for number in range(count)
            if (name, number) not in removed
            and (name, number) not in fixed
            and not is_last((name, number), removed)
        ]
        if not candidates:
            return removed, losses
        trial_losses = [loss_without(frozenset([*removed, layer]), layer) for layer in candidates]
        best_index = first_within_tolerance(trial_losses)
        removed.append(candidates[best_index])
        losses.append(trial_losses[best_index])


@contextmanager
def _layer_hooks(model: Any, stacks: Sequence[Stack], callback: LayerCallback) -> Iterator[None]:
    """Call `callback` with each layer, its input states and its result.

    A module that is used at several positions of a stack is called once for each, in their order.
    """
    handles = [
        module.register_forward_hook(_layer_hook(unit_ids, callback))
        for module, unit_ids in _modules_with_ids(model, stacks)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _modules_with_ids(model: Any, stacks: Sequence[Stack]) -> Iterator[tuple[nn.Module, list[UnitId]]]:
    """Yield the modules of the stacks, each once, with all its positions."""
    for stack in stacks:
        unit_ids: dict[nn.Module, list[UnitId]] = {}
        for index, module in enumerate(stack.modules(model)):
            unit_ids.setdefault(module, []).append((stack.name, index))
        yield from unit_ids.items()


def _layer_hook(
    numbers: list[UnitId], callback: LayerCallback
) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    calls = cycle(numbers)

    def hook(module: nn.Module, inputs: tuple[Any, ...], result: Any) -> None:
        callback(next(calls), inputs[0], result)

    return hook


def _hidden_states(result: Any) -> Tensor:
    states: Tensor = result[0] if isinstance(result, tuple) else result
    return states


# Disables the given units inside the context.
WithoutUnits = Callable[[Collection[UnitId]], AbstractContextManager[None]]


@dataclass
class AblationLosses:
    """Losses of one model on the same samples, each without another unit (see `drop_units_by_loss`).

    Trials in a row with the same units removed start at the layer of the tried unit: the states before it
    are cached.

    prefix_model: the model and its samples, on `device`. without: disables units. layer_of: the layer that
    contains a unit. progress: called with each loss.
    """

    prefix_model: PrefixCachedModel
    device: torch.device
    without: WithoutUnits
    layer_of: Callable[[UnitId], UnitId]
    progress: Callable[[float], None]
    already_removed: frozenset[UnitId] = field(default=frozenset())

    def __call__(self, removed_units: frozenset[UnitId], tried: UnitId | None = None) -> float:
        """Return the loss without `removed_units`; `tried`: the one that is being evaluated, or None."""
        removed_before = removed_units - {tried}
        if tried is None or removed_before != self.already_removed:
            self.prefix_model.reset()
        self.already_removed = removed_before
        if tried is not None:
            with self.without(removed_before):
                self.prefix_model.start_at(*self.layer_of(tried))
        objective = self.prefix_model.resume_each(label_objective())
        with self.without(removed_units):
            loss = mean_loss(
                self.prefix_model.model, self.prefix_model.batches, objective, "fp32", self.device
            )
        self.progress(loss)
        return loss


@contextmanager
def ablation_losses(
    model: Any,
    batches: Sequence[TensorBatch],
    without: WithoutUnits,
    ctx: Context,
    max_trials: int,
    layer_of: Callable[[UnitId], UnitId] = lambda layer: layer,
) -> Iterator[AblationLosses]:
    """Yield the losses of `model`, in eval mode, which is on the device of `ctx` inside the context.

    Args:
        model: of a supported family.
        batches: with labels.
        without: see `AblationLosses`.
        ctx: device, progress; a temporary folder next to `ctx.out` if memory is short.
        max_trials: the number of losses, for the display.
        layer_of: see `AblationLosses`; by default a unit is a layer.
    """
    tries = 0

    def progress(loss: float) -> None:
        nonlocal tries
        tries += 1
        ctx.progress(tries, max_trials, f"loss {loss:.3f}")

    with model_on_device(model, ctx) as device, tempfile.TemporaryDirectory(dir=ctx.out.parent) as folder:
        device_batches = [{name: value.to(device) for name, value in batch.items()} for batch in batches]
        yield AblationLosses(
            PrefixCachedModel(model, device_batches, Path(folder)), device, without, layer_of, progress
        )


def max_trials(num_kept: dict[str, int], num_present: dict[str, int]) -> int:
    """Return the largest possible number of losses, for the display."""
    num_dropped = sum(num_present[name] - count for name, count in num_kept.items())
    layers = sum(num_present[name] for name in num_kept)
    return 1 + sum(layers - step for step in range(num_dropped))


@contextmanager
def model_on_device(model: Any, ctx: Context) -> Iterator[torch.device]:
    """Move `model` to the device of `ctx` inside the context."""
    device = torch.device(torch_device(ctx.device))
    try:
        model.to(device)
        yield device
    finally:
        model.to("cpu")


def select_by_influence(
    model: Any,
    streamed: StreamedModel | None,
    stacks: list[Stack],
    num_kept: dict[str, int],
    src: Artifact,
    settings: DropLayersSettings,
    ctx: Context,
) -> dict[str, list[int]]:
    """Return the layers with the largest block influence by stack, `num_kept` of each, rising."""
    samples = load_calibration_samples(model, src, settings.calibration_samples, ctx, "drop-layers")
    if streamed is not None:
        influence = streamed_block_influence(streamed, stacks, samples, ctx)
    else:
        with model_on_device(model, ctx) as device:
            batches = batches_on_device_one_by_one(samples.batches, device, ctx)
            influence = block_influence(model, stacks, batches)
    influence = {name: [round(value, 6) for value in values] for name, values in influence.items()}
    ctx.details["block_influence"] = influence
    keeps_first = keeps_first_layer(model)
    is_last = last_part_test(model, stacks)
    kept_by_stack = {}
    for name, count in num_kept.items():
        order = sorted(
            (not (keeps_first and index == 0), -value, index) for index, value in enumerate(influence[name])
        )
        removed: list[UnitId] = []
        for layer in [(name, index) for _, _, index in reversed(order)]:
            if len(order) - len(removed) > count and not is_last(layer, removed):
                removed.append(layer)
        kept_by_stack[name] = [index for index in range(len(order)) if (name, index) not in removed]
    return kept_by_stack


def select_by_loss(
    model: Any,
    stacks: list[Stack],
    kept_layers: dict[str, list[int]],
    num_kept: dict[str, int],
    src: Artifact,
    settings: DropLayersSettings,
    ctx: Context,
) -> dict[str, list[int]]:
    """Return the layers to keep by stack after removing one by one the layer with the smallest loss without.

    kept_layers: by stack, the layers that settings keep by index; the others are removed first.

    Raises:
        InputError: there are no samples, or the pairs of a sentence embedder have no scores.
    """
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is not None and (errors := missing_labels_errors(ctx.task, {"rows": split}, ("rows",))):
        raise InputError(
            f"drop-layers: importance: loss: {errors[0].message} Or set importance: block-influence.",
            code=errors[0].code,
            setting="importance",
        )
    counts = {stack.name: len(stack.modules(model)) for stack in stacks}
    plain_modules: set[torch.nn.Module] = set()
    removed: set[UnitId] = {
        (n, index)
        for n, kept_indices in kept_layers.items()
        for index in range(counts[n])
        if index not in kept_indices
    }
    batches = load_calibration_samples(
        model, src, settings.calibration_samples, ctx, "drop-layers", labels=True, padded=True
    ).batches
    is_last = last_part_test(model, stacks, removed)

    def without_more(removed_units: Collection[UnitId]) -> AbstractContextManager[None]:
        return without_layers(model, stacks, {*removed_units, *removed}, plain_modules)

    with ablation_losses(model, batches, without_more, ctx, max_trials(num_kept, counts)) as loss_without:
        ctx.details["loss_before"] = round(loss_without(frozenset()), 6)
        required = {(name, 0) for name in num_kept} if keeps_first_layer(model) else set()
        dropped, losses = drop_units_by_loss(
            num_kept, {n: counts[n] for n in num_kept}, required, loss_without, is_last
        )
    ctx.details["dropped"] = [
        {"stack": name, "layer": layer_index, "loss": round(loss, 6)}
        for (name, layer_index), loss in zip(dropped, losses, strict=True)
    ]
    return {
        name: [index for index in range(counts[name]) if (name, index) not in dropped] for name in num_kept
    }


def last_part_test(
    model: Any, stacks: list[Stack], removed: Collection[UnitId] = ()
) -> Callable[[UnitId, Collection[UnitId]], bool]:
    """Return a function that tests whether a layer has the last part of some kind once others are removed.

    An earlier step may have removed parts of the other layers, and one of each kind must be kept in a stack.

    removed: layers that are removed first.
    """
    present_parts = {
        stack.name: [
            set(range(len(stack.attentions) + 1)) - skipped_parts(layer) for layer in stack.modules(model)
        ]
        for stack in stacks
    }

    def is_last(layer: UnitId, removed_units: Collection[UnitId]) -> bool:
        name, layer_index = layer
        all_removed = {*removed_units, *removed, layer}
        other_parts = [
            parts for index, parts in enumerate(present_parts[name]) if (name, index) not in all_removed
        ]
        return not present_parts[name][layer_index] <= set().union(*other_parts)

    return is_last


def keeps_first_layer(model: Any) -> bool:
    """Return whether the first layer of each stack of `model` cannot be removed."""
    family = family_of(model)
    return family is not None and family.first_layer_reason is not None


def batches_on_device_one_by_one(
    batches: list[TensorBatch], device: torch.device, ctx: Context
) -> Iterator[TensorBatch]:
    """Yield `batches` on `device`, and report progress to `ctx`."""
    for done, batch in enumerate(batches, start=1):
        yield {name: value.to(device) for name, value in batch.items()}
        ctx.progress(done, len(batches), "block influence")
