"""FSDP: parameters, gradients and optimizer states divided over the processes of a training.

torch's `fully_shard` (FSDP2; Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277) replaces the parameters of a
model by DTensors, each process holding a slice of the first axis; a layer is gathered when it computes. The
model is divided before its optimizer is created, and is whole again after the training. What needs whole
weights between updates (a checkpoint that is scored) has them inside `ShardedModel.whole`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smelt.core.process_group import process_count, process_rank
from smelt.training.extension import ParameterGroup, attached_modules
from smelt.training.processes import LaunchSettings
from smelt.training.training_state import frozen_pad_rows, masked_weights

_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
)  # fmt: skip
_HOOK_OPTIONS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")


@dataclass(frozen=True)
class ModuleState:
    """Its class, the mapping of its parameters, the names of its attributes, the keys of its hooks."""

    module: nn.Module
    kind: type
    parameters: dict[str, nn.Parameter | None]
    attributes: frozenset[str]
    hooks: dict[str, frozenset[int]]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """Return the present state of `module`."""
        hooks = {name: frozenset(getattr(module, name)) for name in (*_HOOKS, *_HOOK_OPTIONS)}
        return cls(module, type(module), module._parameters, frozenset(vars(module)), hooks)

    def restore(self) -> None:
        """Restore class and mapping, and remove attributes and hooks that were added."""
        from torch.distributed._composable_state import _module_state_mapping

        module, attributes = self.module, vars(self.module)
        module.__class__ = self.kind
        module._parameters = self.parameters
        for name in attributes.keys() - self.attributes:
            del attributes[name]
        for name, before in self.hooks.items():
            hooks: Any = getattr(module, name)
            for key in hooks.keys() - before:
                del hooks[key]
        _module_state_mapping.pop(module, None)  # else FSDP cannot divide the module again


@contextlib.contextmanager
def buffers_on_cpu(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Hold the buffers of `modules` on the CPU inside the context, next to whole parameters."""
    before = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
    for owner, name, buffer in before:
        owner._buffers[name] = buffer.cpu()
    try:
        yield
    finally:
        for owner, name, buffer in before:
            owner._buffers[name] = buffer


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a divided tensor, sharing memory; another tensor unchanged.

    Of a parameter that ZeRO divides it is a vector, padded to the same size in each process.
    """
    if hasattr(tensor, "ds_tensor"):
        shard: Tensor = tensor.ds_tensor
        return shard
    local_tensor: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local_tensor


def whole_tensor(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a divided tensor as a whole one; all processes must call it. Another tensor is unchanged.

    like: a divided tensor of which `tensor` is this process's part.
    """
    zero: Any = tensor if like is None else like
    if hasattr(zero, "ds_tensor"):
        shard = local_part(tensor).detach()
        parts = shard.new_empty(process_count() * shard.numel())
        torch.distributed.all_gather(list(parts.chunk(process_count())), shard.contiguous())
        return parts[: zero.ds_numel].view(zero.ds_shape)
    if like is not None and hasattr(like, "full_tensor"):
        from torch.distributed.tensor import DTensor

        divided_tensor: Any = like
        shard = tensor.to(local_part(like).device)
        tensor = DTensor.from_local(
            shard,
            divided_tensor.device_mesh,
            divided_tensor.placements,
            shape=like.shape,
            stride=like.stride(),
        )
    full_tensor: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full_tensor


def in_first(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU in process 0, and an empty one in the others, which do not write it."""
    return tensor.cpu() if process_rank() == 0 else tensor.new_empty(0, device="cpu")


def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor divided as `like`, of ZeRO this process's part; unchanged if `like` is whole."""
    if hasattr(like, "ds_tensor"):
        size = like.ds_tensor.numel()
        padded = nn.functional.pad(tensor.flatten(), (0, process_count() * size - tensor.numel()))
        shard: Tensor = padded[process_rank() * size :][:size].to(like.ds_tensor.device)
        return shard
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    divided_tensor: Any = like
    distributed: Tensor = distribute_tensor(
        tensor.to(local_part(like).device), divided_tensor.device_mesh, divided_tensor.placements
    )
    return distributed


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model: the members of its outermost module lists.

    Layers that share a parameter with another module are left out, since FSDP would divide it twice, and
    the modules of techniques, which compute outside of their `forward`.
    """
    attached = attached_modules(model)

    def members(module: nn.Module) -> list[nn.Module]:
        layer_list: list[nn.Module] = []
        for child in module.children():
            if child is not attached:
                layer_list += list(child) if isinstance(child, nn.ModuleList) else members(child)
        return layer_list

    layers = list(dict.fromkeys(members(model)))
    layer_modules = {submodule for layer in layers for submodule in layer.modules()}
    users = Counter(id(p) for layer in layers for p in layer.parameters())
    users.update(
        id(p) for m in model.modules() if m not in layer_modules for p in m.parameters(recurse=False)
    )
    return [layer for layer in layers if all(users[id(p)] == 1 for p in layer.parameters())]


@dataclass
class _Place:
    """A parameter of a module: the whole one, whose object is kept, and the divided one."""

    owner: nn.Module
    name: str
    whole: nn.Parameter
    divided: nn.Parameter

    def use(self, parameter: nn.Parameter) -> None:
        self.owner._parameters[self.name] = parameter


class ShardedModel:
    """Divides the parameters of a module; see `sharded`."""

    divides_parameters = True

    def __init__(
        self, module: nn.Module, model: nn.Module, launch: LaunchSettings, device: torch.device
    ) -> None:
        """Divide the parameters of `module`, which contains `model`."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        self._modules = list(module.modules())
        self._states = [ModuleState.of(submodule) for submodule in self._modules]
        frozen_rows, masked = frozen_pad_rows(model), masked_weights(model)
        parameter_slots = [
            _Place(owner, name, parameter, parameter)
            for owner in self._modules
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        offload = CPUOffloadPolicy() if launch.cpu_offload else OffloadPolicy()
        # moves each part to the device when it is divided: the whole model need not fit there
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh, offload_policy=offload)
        # also the outermost part: weights are exchanged between passes (averages, the best ones)
        fully_shard(module, mesh=mesh, offload_policy=offload, reshard_after_forward=True)
        for slot in parameter_slots:
            divided_parameter = slot.owner._parameters[slot.name]
            assert divided_parameter is not None
            slot.divided = divided_parameter
        self._places = parameter_slots
        divided_by_id = {id(slot.whole): slot.divided for slot in parameter_slots}
        for parameter, row in frozen_rows:
            _freeze(divided_by_id[id(parameter)], _is_not_row(divided_by_id[id(parameter)], row))
        for parameter in masked:
            _freeze(divided_by_id[id(parameter)], local_part(divided_by_id[id(parameter)].detach()) != 0)
        self._divided = divided_by_id
        for slot in parameter_slots:
            slot.whole.data = slot.whole.data.new_empty(0)

    def groups(self, groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
        """Return groups of the parameters before they were divided, with the divided ones."""
        divided_by_id = self._divided
        return [
            replace(group, parameters=[divided_by_id[id(p)] for p in group.parameters]) for group in groups
        ]

    @contextlib.contextmanager
    def whole(self, part: nn.Module | None = None) -> Iterator[None]:
        """Hold whole parameters on the CPU inside the context; changes of them are lost.

        All processes must enter it, with no computation of the model running. part: only those of this part.
        """
        chosen_modules = set(self._modules if part is None else part.modules())
        chosen_slots = [slot for slot in self._places if slot.owner in chosen_modules]
        kinds = [(module, type(module)) for module in chosen_modules]
        self._gather(chosen_slots)
        for state in self._states:
            if state.module in chosen_modules:
                state.module.__class__ = state.kind
        try:
            with buffers_on_cpu(chosen_modules):
                yield
        finally:
            for module, kind in kinds:
                module.__class__ = kind
            for slot in chosen_slots:
                slot.use(slot.divided)
                slot.whole.data = slot.whole.data.new_empty(0)

    def restore(self) -> None:
        """Make the modules ordinary ones again, with the trained parameters, on the CPU."""
        self._gather(self._places)
        self.release()

    def release(self) -> None:
        """Remove what FSDP has added to the modules."""
        for slot in self._places:
            slot.use(slot.whole)
        for state in self._states:
            state.restore()

    @torch.no_grad()
    def _gather(self, places: Sequence[_Place]) -> None:
        """Use the whole parameters at `places`, with the present values."""
        for full, divided_parameter in {id(p.whole): (p.whole, p.divided) for p in places}.values():
            full.data = whole_tensor(divided_parameter.detach()).to("cpu")
        for slot in places:
            slot.use(slot.whole)


@contextlib.contextmanager
def sharded(
    module: nn.Module, model: nn.Module, launch: LaunchSettings, device: torch.device
) -> Iterator[ShardedModel]:
    """Divide the parameters of `module`, which contains `model`, inside the context.

    At the end the modules are ordinary ones again, and the parameters the same objects as before, with the
    trained values, on the CPU, in each process.
    """
    sharded_model = ShardedModel(module, model, launch, device)
    try:
        yield sharded_model
    except BaseException:
        sharded_model.release()  # the others may have failed too, so nothing can be gathered
        raise
    sharded_model.restore()


def _is_not_row(divided: Tensor, row: int) -> Tensor:
    """Return which of the rows of this process's part are not `row` of the whole tensor, bool [n, 1]."""
    local = local_part(divided)
    size = -(-divided.shape[0] // torch.distributed.get_world_size())  # of every part but the last ones
    numbers = torch.distributed.get_rank() * size + torch.arange(len(local), device=local.device)
    is_other_row: Tensor = (numbers != row)[:, None]
    return is_other_row


def _freeze(divided: nn.Parameter, trained: Tensor) -> None:
    """Keep the gradient of a divided parameter zero where `trained`, of this process's part, is false."""
    divided.register_post_accumulate_grad_hook(partial(_zero_gradient, trained))


def _zero_gradient(trained: Tensor, parameter: Tensor) -> None:
    if parameter.grad is not None:
        local_part(parameter.grad).mul_(trained)
