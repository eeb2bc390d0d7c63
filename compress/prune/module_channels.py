"""Channels of a user's PyTorch module: torch-pruning finds which layers share them.

A group is the outputs of some layers and the inputs of others that have one channel in common: of a residual
sum all of its summands. A group is pruned only if each of its tensors belongs to a layer whose size can be
changed, and all of its channels reach each of these layers. That removing the channels equals setting them to
zero where they are read is checked on random images; it fails where the user's code depends on their number.

Source of the graph: Fang et al. 2023, DepGraph, arXiv:2301.12900.

Shapes: C = channels of a group; n = outputs or inputs of a layer.
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smelt.compress.prune.units import whole_kernel
from smelt.core.errors import InputError
from smelt.models.edits import Edit, is_masked, mark_masked, replace_layer
from smelt.models.families.family import MODULE_PREFIX
from smelt.models.layers import resize_batch_norm, resize_conv
from smelt.models.user_module import fixed_layers

_OUTPUTS, _INPUTS = 0, 1  # axes of a weight
_TOLERANCE = 1e-3  # of the largest output: rounding of sums in another order


@dataclass(frozen=True)
class LayerAxis:
    """The outputs or inputs of a layer that are channels of a group.

    layer: its name. axis: of its weight; 0, the outputs, also of norms. channels: int64 [n], the channel of
    each output or input; -1 for those of other groups.
    """

    layer: str
    axis: int
    channels: Tensor


@dataclass(frozen=True)
class CoupledChannels:
    """Channels that several layers share. name: the first layer that computes them. size: C."""

    name: str
    size: int
    axes: tuple[LayerAxis, ...]

    def count(self, model: nn.Module) -> int:
        """Return the number of channels."""
        return self.size

    def filter_norms(self, model: nn.Module) -> Tensor:
        """Return the sum of the L1 norms of the filters that compute each channel, float64 [C]."""
        norms = torch.zeros(self.size, dtype=torch.float64)
        for each in self.axes:
            layer = model.get_submodule(each.layer)
            if each.axis == _OUTPUTS and not isinstance(layer, nn.BatchNorm2d):
                rows = whole_kernel(layer).double().abs().flatten(1).sum(dim=1)
                norms.index_add_(0, each.channels[each.channels >= 0], rows[each.channels >= 0])
        return norms

    def add_gate(self, model: nn.Module, gate: Tensor) -> list[RemovableHandle]:
        """Multiply the channels by `gate`, float [C], wherever they are read; return the hooks."""
        return [
            model.get_submodule(each.layer).register_forward_pre_hook(_gate_hook(gate, each.channels))
            for each in self.axes
            if each.axis == _INPUTS
        ]


def _gate_hook(gate: Tensor, channels: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor]]:
    def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        factors = torch.cat([gate, gate.new_ones(1)])[channels]  # -1 is the last one
        return (inputs[0] * (factors[:, None, None] if isinstance(layer, nn.Conv2d) else factors),)

    return hook


def find_module_channels(model: Any, size: tuple[int, int]) -> list[CoupledChannels]:
    """Return the channel groups of a user's module that can be pruned, in order.

    Args:
        model: float; not changed.
        size: height and width of its images.

    Raises:
        InputError: `not-prunable`: torch-pruning cannot follow the module, or it has no such channels.
    """
    network = copy.deepcopy(getattr(model, MODULE_PREFIX))
    names = {module: f"{MODULE_PREFIX}.{name}" for name, module in network.named_modules()}
    fixed = {name for name, module in model.named_modules() if module in fixed_layers(model)}
    try:
        items = _torch_pruning_groups(network, torch.zeros(2, 3, *size))
    except Exception as error:  # it fails in many ways on code that it cannot follow
        raise InputError(
            f"prune: torch-pruning cannot follow the module: {type(error).__name__}: {error}. Remove prune.",
            code="not-prunable",
        ) from error
    groups = [group for each in items if (group := _read_group(each, names, fixed)) is not None]
    if not groups:
        raise InputError(
            "prune: the module has no channels that only convolutions and linear layers share, so that they"
            " could be removed. Remove prune.",
            code="not-prunable",
        )
    return groups


_Item: TypeAlias = tuple[Any, bool, list[int], list[int]]  # module, whether inputs, positions, channels


def _torch_pruning_groups(network: nn.Module, pixels: Tensor) -> list[list[_Item]]:
    import torch_pruning

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # it prints parameters
        warnings.simplefilter("ignore")
        graph = torch_pruning.DependencyGraph().build_dependency(network, pixels)
        return [
            [
                (
                    item.dep.target.module,
                    graph.is_in_channel_pruning_fn(item.dep.handler),
                    item.idxs,
                    item.root_idxs,
                )
                for item in group.items
            ]
            for group in graph.get_all_groups(root_module_types=(nn.Conv2d, nn.Linear))
        ]


def _read_group(
    items: Sequence[_Item], names: Mapping[nn.Module, str], fixed: set[str]
) -> CoupledChannels | None:
    """Return a group of torch-pruning, None if it cannot be pruned."""
    from torch_pruning import ops

    axes = []
    root, _, _, channels = items[0]
    for module, is_input, positions, roots in items:
        if isinstance(module, nn.Parameter | ops._OutputOp):
            return None  # no layer, or the outputs of the model
        if module not in names:
            continue  # an operation without weights
        sizes = _axis_sizes(module)
        if sizes is None or names[module] in fixed or set(roots) != set(channels):
            return None
        reads = is_input and not isinstance(module, nn.BatchNorm2d) and not _is_depthwise(module)
        layer_axis = _INPUTS if reads else _OUTPUTS
        channel_of = torch.full((sizes[layer_axis],), -1)
        channel_of[positions] = torch.tensor(roots)
        axes.append(LayerAxis(names[module], layer_axis, channel_of))
    is_read = any(each.axis == _INPUTS for each in axes)
    return CoupledChannels(names[root], len(channels), tuple(axes)) if is_read else None


def _axis_sizes(layer: nn.Module) -> tuple[int, int] | None:
    """Return the outputs and inputs of a layer whose size can be changed, None for others."""
    if isinstance(layer, nn.Conv2d) and (layer.groups == 1 or _is_depthwise(layer)):
        return layer.out_channels, layer.in_channels
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    if isinstance(layer, nn.BatchNorm2d) and layer.affine and layer.track_running_stats:
        return layer.num_features, 0
    return None


def _is_depthwise(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels == layer.out_channels > 1


def cut_module_channels(
    model: Any,
    edits: list[Edit],
    groups: Sequence[CoupledChannels],
    kept_channels: Mapping[str, Tensor],
    size: tuple[int, int],
) -> None:
    """Keep `kept_channels` (int64, by group name; of other groups all) in all layers that share them.

    Raises:
        InputError: `not-prunable`: the module computes something else than with the other channels at zero.
    """
    pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    expected = _output_with_zeros(model, groups, kept_channels, pixels)
    stays: dict[str, list[Tensor | None]] = {}
    for group in groups:
        for each in group.axes if group.name in kept_channels else ():
            stay = torch.isin(each.channels, kept_channels[group.name]) | (each.channels < 0)
            layer_stays = stays.setdefault(each.layer, [None, None])
            before = layer_stays[each.axis]
            layer_stays[each.axis] = stay if before is None else before & stay
    for name, (outputs, inputs) in stays.items():
        _cut_layer(model, edits, name, outputs, inputs)
    try:
        output = _run(model, pixels)
        differs = not torch.allclose(output, expected, rtol=0, atol=_TOLERANCE * float(expected.abs().max()))
        problem = "its outputs are not those of the module with these channels at zero" if differs else ""
    except Exception as error:  # whatever the user's code does
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise InputError(
            f"prune: with fewer channels the module fails: {problem}. Its code depends on their number. Write"
            " it with -1 in place of a width, or remove prune.",
            code="not-prunable",
        )


@torch.no_grad()
def _run(model: Any, pixels: Tensor) -> Tensor:
    output: Tensor = model(pixel_values=pixels).logits
    return output


def _output_with_zeros(
    model: Any, groups: Sequence[CoupledChannels], kept_channels: Mapping[str, Tensor], pixels: Tensor
) -> Tensor:
    handles: list[RemovableHandle] = []
    for group in groups:
        if group.name in kept_channels:
            gate = torch.zeros(group.size)
            gate[kept_channels[group.name]] = 1
            handles += group.add_gate(model, gate)
    try:
        return _run(model, pixels)
    finally:
        for handle in handles:
            handle.remove()


def _cut_layer(
    model: Any, edits: list[Edit], name: str, outputs: Tensor | None, inputs: Tensor | None
) -> None:
    """Keep some outputs and inputs (bool [n]; None: all) of the layer `name`."""
    old = model.get_submodule(name)
    if isinstance(old, nn.BatchNorm2d):
        assert outputs is not None
        new: nn.Module = resize_batch_norm(old, int(outputs.sum()))
        new.load_state_dict({n: t[outputs] if t.dim() else t for n, t in old.state_dict().items()})
        edit: Edit = {"op": "batch_norm", "module": name, "num_features": int(outputs.sum())}
    else:
        weight, bias = old.weight.detach(), None if old.bias is None else old.bias.detach()
        if outputs is not None:
            weight, bias = weight[outputs], None if bias is None else bias[outputs]
        if inputs is not None:
            weight = weight[:, inputs]
        new, edit = _sized_layer(old, name, weight)
        new.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
        if is_masked(old):
            mark_masked(new)
    replace_layer(model, edits, name, new.train(old.training), edit)


def _sized_layer(old: Any, name: str, weight: Tensor) -> tuple[nn.Module, Edit]:
    """Return an empty layer like `old` for `weight`, and its edit."""
    if isinstance(old, nn.Linear):
        sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
        return nn.Linear(**sizes, bias=old.bias is not None), {"op": "linear", "module": name, **sizes}
    inputs = weight.shape[0] if _is_depthwise(old) else weight.shape[1]
    sizes = {"in_channels": inputs, "out_channels": weight.shape[0]}
    return resize_conv(old, **sizes), {"op": "conv", "module": name, **sizes}
