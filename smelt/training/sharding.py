"""Trainings whose parameters are divided over processes, by accelerate's FSDP plugin or DeepSpeed's ZeRO.

FSDP2 (Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277) replaces parameters by DTensors, of which each
process holds a slice of the first axis; a layer is gathered when it computes. accelerate divides the model
when Trainer prepares it. A process then reads and writes its parts; whole weights are gathered to score a
checkpoint, and at the end.

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): stage 1 divides the optimizer states, stage 2 also the
gradients, stage 3 also the parameters. Trainer starts it with the optimizer of the recipe: DeepSpeed's own
would be compiled. DeepSpeed's checkpoints are pickled, so none are written.
"""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from smelt.core.process_group import process_rank
from smelt.training.extension import attached_modules
from smelt.training.processes import LaunchSettings
from smelt.training.training_state import frozen_pad_rows, masked_weights


def fsdp_config(model: nn.Module, launch: LaunchSettings) -> dict[str, Any]:
    """Return the `fsdp_config` of Trainer: each repeated layer of `model` is gathered by itself."""
    names = _layer_class_names(model)
    return {
        "version": 2,
        "cpu_offload": launch.cpu_offload,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if names else "NO_WRAP",
        "transformer_layer_cls_to_wrap": names,
    }


def _layer_class_names(model: nn.Module) -> list[str]:
    """Return the classes of the repeated layers of a model: the members of its outermost module lists.

    Classes with a module that shares a parameter with another one are left out, since FSDP would divide it
    twice, and the modules of techniques, which compute outside of their `forward`.
    """
    attached = attached_modules(model)

    def members(module: nn.Module) -> list[nn.Module]:
        layer_list: list[nn.Module] = []
        for child in module.children():
            if child is not attached:
                layer_list += list(child) if isinstance(child, nn.ModuleList) else members(child)
        return layer_list

    names = {type(layer).__name__ for layer in members(model)}
    owners: dict[int, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].add(module)
    for module in model.modules():
        if (name := type(module).__name__) in names:
            submodules = set(module.modules())
            if any(not owners[id(parameter)] <= submodules for parameter in module.parameters()):
                names.remove(name)
    return sorted(names)


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a divided tensor, sharing memory; another tensor unchanged."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def whole_tensor(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a divided tensor as a whole one; all processes must call it. Another tensor is unchanged.

    like: a divided tensor of which `tensor` is this process's part.
    """
    if isinstance(like, DTensor):
        tensor = DTensor.from_local(
            tensor.to(local_part(like).device),
            like.device_mesh,
            like.placements,
            shape=like.shape,
            stride=like.stride(),
        )
    full_tensor: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full_tensor


def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor divided as `like`; unchanged if `like` is whole."""
    if not isinstance(like, DTensor):
        return tensor
    divided: Tensor = distribute_tensor(tensor, like.device_mesh, like.placements).to(like.device)
    return divided


class ModelWeights:
    """The weights of a module in training, which every process has whole.

    is_divided: whether each process has a part only, so that all must take part in each pass.
    supports_resume: whether checkpoints of the training can be written.
    """

    is_divided = False
    supports_resume = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def begin(self) -> None:
        """Prepare the weights when Trainer has prepared the module, before the first pass."""

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy of this process's part of a parameter or buffer, on the CPU."""
        return tensor.detach().to("cpu", copy=True)

    @torch.no_grad()
    def write(self, tensor: Tensor, part: Tensor) -> None:
        """Set this process's part of a parameter or buffer."""
        tensor.copy_(part)

    def reshard(self) -> None:
        """Free what a pass without gradients has gathered, before weights are read or written."""

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Hold whole weights inside the context; if they are divided, on the CPU, and changes are lost.

        All processes must enter it.
        """
        yield

    def restore(self) -> None:
        """Make the module an ordinary one again, with whole weights, in each process."""


class DividedWeights(ModelWeights, ABC):
    """Weights that are replaced by whole ones between passes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._states = [_ModuleState(submodule) for submodule in module.modules()]

    @abstractmethod
    def gather(self, tensor: Tensor) -> Tensor:
        """Return a whole tensor on the CPU, which shares no memory with `tensor`."""

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Hold whole weights on the CPU inside the context; changes of them are lost."""
        slots = self._use_whole()
        try:
            yield
        finally:
            for owner, name, tensor in slots:
                setattr(owner, name, tensor)

    def restore(self) -> None:
        """Make the module an ordinary one again, with whole weights on the CPU, in each process."""
        self._use_whole()
        for state in self._states:
            state.restore()

    @torch.no_grad()
    def _use_whole(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Replace parameters and buffers by whole ones; return the module, name and tensor of each."""
        self.reshard()
        slots = [
            (submodule, name, tensor)
            for submodule in self.module.modules()
            for name, tensor in chain(
                submodule.named_parameters(recurse=False, remove_duplicate=False),
                submodule.named_buffers(recurse=False, remove_duplicate=False),
            )
        ]
        whole_tensors: dict[int, Tensor] = {}  # of shared ones, one
        for submodule, name, tensor in slots:
            if (gathered := whole_tensors.get(id(tensor))) is None:
                gathered = self.gather(tensor)
                if isinstance(tensor, nn.Parameter):
                    gathered = nn.Parameter(gathered, tensor.requires_grad)
                whole_tensors[id(tensor)] = gathered
            setattr(submodule, name, gathered)
        return slots


class FsdpWeights(DividedWeights):
    """Weights whose parameters accelerate's FSDP plugin divides."""

    is_divided = True

    def begin(self) -> None:
        """Freeze padding embeddings and zeros again: FSDP replaces parameters, without their hooks."""
        for weight, row in frozen_pad_rows(self.module.model):
            is_other_row = (torch.arange(len(weight)) != row)[:, None]
            _freeze(weight, local_part(divided_like(is_other_row, weight)))
        for weight in masked_weights(self.module):
            _freeze(weight, local_part(weight.detach()) != 0)

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy of this process's part of a parameter or buffer, on the CPU."""
        return super().read(local_part(tensor))

    def write(self, tensor: Tensor, part: Tensor) -> None:
        """Set this process's part of a parameter or buffer."""
        super().write(local_part(tensor), part)

    def reshard(self) -> None:
        """Free gathered parameters: the outermost ones stay for a backward pass, and would be used again."""
        for submodule in self.module.modules():
            if isinstance(submodule, FSDPModule):
                submodule.reshard()

    def gather(self, tensor: Tensor) -> Tensor:
        """Return a whole tensor on the CPU, which shares no memory with `tensor`."""
        return whole_tensor(tensor.detach()).to("cpu", copy=True)

    def restore(self) -> None:
        """Make the module an ordinary one again; its layers are new objects, which FSDP can divide again."""
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        layers = [submodule for submodule in self.module.modules() if isinstance(submodule, FSDPModule)]
        super().restore()
        new_layers = {layer: copy.copy(layer) for layer in layers if layer is not self.module}
        for name, submodule in list(self.module.named_modules(remove_duplicate=False)):
            if submodule in new_layers:
                self.module.set_submodule(name, new_layers[submodule])


class _ModuleState:
    """The class, attributes and hooks of a module, which FSDP and DeepSpeed change and do not restore."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.kind, self.attributes = module, type(module), dict(vars(module))
        self.keys = {name: set(value) for name, value in vars(module).items() if isinstance(value, dict)}

    def restore(self) -> None:
        """Restore the class and the dictionaries; remove attributes and entries, such as hooks."""
        attributes = vars(self.module)
        self.module.__class__ = self.kind
        for name in attributes.keys() - self.attributes.keys():
            del attributes[name]
        for name, keys in self.keys.items():
            entries = {key: value for key, value in attributes[name].items() if key in keys}
            attributes[name] = self.attributes[name]  # the same object, from which handles remove their hooks
            attributes[name].clear()
            attributes[name].update(entries)


def _freeze(divided: Tensor, trained: Tensor) -> None:
    """Keep the gradient of a divided parameter zero where `trained`, of this process's part, is false."""
    divided.register_post_accumulate_grad_hook(partial(_zero_gradient, trained))


def _zero_gradient(trained: Tensor, parameter: Tensor) -> None:
    if parameter.grad is not None:
        local_part(parameter.grad).mul_(trained.to(parameter.grad.device))


# Values that are exchanged at once, 20 MB; DistributedDataParallel exchanges 25 MiB. Buffers of DeepSpeed's
# default, 500 million, take more memory than ZeRO saves (docs/measurements/deepspeed.md).
_BUCKET = 5_000_000


def zero_config(launch: LaunchSettings, model: nn.Module) -> dict[str, Any]:
    """Return the settings that Trainer passes to DeepSpeed.

    Precision, optimizer and schedule are the stage's, which Trainer creates.
    """
    bucket = min(sum(p.numel() for p in model.parameters() if p.requires_grad), _BUCKET)
    config: dict[str, Any] = {
        "stage": launch.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket + bucket % 2,  # DeepSpeed requires an even one
        **launch.zero_options,
    }
    if launch.cpu_offload:
        config["offload_optimizer"] = {"device": "cpu"}
    if launch.zero_stage == 3:
        # no parameter stays whole after it was used: weights are exchanged between updates
        config |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        if launch.cpu_offload:
            config["offload_param"] = {"device": "cpu"}
    return {
        "zero_optimization": config,
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }


class ZeroWeights(DividedWeights):
    """Weights that DeepSpeed trains.

    Of parameters that stage 3 divides, process 0 reads and writes whole ones, and the others nothing.
    """

    supports_resume = False

    def __init__(self, module: nn.Module, launch: LaunchSettings, device: torch.device) -> None:
        import deepspeed

        super().__init__(module)
        self.is_divided, self._gathered = launch.zero_stage == 3, deepspeed.zero.GatheredParameters
        # one for every exchange: torch 2.13 renames the functions that DeepSpeed calls
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        if device.type == "cpu":
            # otherwise it compiles a C++ extension for all-reduce in shared memory
            vars(deepspeed.ops)["__compatible_ops__"] = {}

    def begin(self) -> None:
        """Keep transformers from dividing the models that checkpoints are scored with."""
        unset_hf_deepspeed_config()

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy of a parameter or buffer on the CPU, of a divided one in process 0 alone."""
        if not self._divides(tensor):
            return super().read(tensor)
        gathered = self.gather(tensor)
        return gathered if process_rank() == 0 else gathered.new_empty(0)

    def write(self, tensor: Tensor, part: Tensor) -> None:
        """Set a parameter or buffer; a divided one to the `part` of process 0."""
        if not self._divides(tensor):
            super().write(tensor, part)
            return
        with self._gathered([tensor], modifier_rank=0):
            if process_rank() == 0:
                super().write(tensor, part)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return a whole tensor on the CPU, which shares no memory with `tensor`."""
        if not self._divides(tensor):
            return super().read(tensor)
        with self._gathered([tensor]):
            return super().read(tensor)

    def restore(self) -> None:
        """Make the module an ordinary one again, with whole weights on the CPU, in each process."""
        super().restore()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)

    def _divides(self, tensor: Tensor) -> bool:
        return self.is_divided and isinstance(tensor, nn.Parameter)
