"""Mask of the hidden width: one mask per channel of the hidden states, shared by encoder and decoder.

A channel runs through all blocks, so its mask z is the same everywhere. It multiplies the outputs of
embeddings, of each attention and feed-forward part, and of each norm. Norms only use the open channels
(z > 0), so that a model without the closed ones computes the same:

    y = (x - mean of open x) / sqrt(var of open x + eps) * w + b        0 where z = 0; then times z

In a tied embedding and output layer, z also multiplies the layer's inputs. Sinusoidal positions, which are
not stored, are 0 where z is 0, and unchanged elsewhere.

Sources: CoFi, Xia et al. 2022, arXiv:2204.00408, modeling_bert.py; for pre-norm models Sheared LLaMA, Xia
et al. 2023, arXiv:2310.06694, composer_llama.py.

Shapes: D = channels of the hidden states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compress.prune.learned.hard_concrete import (
    INITIAL_LOG_ALPHA,
    deterministic_mask_at,
    most_open,
    open_probability,
    sample_mask,
)
from smelt.compress.prune.width.channel_scores import hidden_norms
from smelt.families.model_blocks import blocks_of
from smelt.families.registry import family_of
from smelt.runtime.models.edits.hidden_width import (
    hidden_width,
    prune_hidden_width,
    temporary_hidden_width,
    write_width_to_config,
)
from smelt.runtime.models.hidden_axes import HiddenAxis, hidden_axes
from smelt.runtime.models.structure import Edit


class HiddenWidthMask:
    """The mask of a model's hidden width during training.

    Args:
        model: float; changed when the mask is folded or cut.
        round_to: the kept channels are a multiple of it.

    Raises:
        InputError: the model's family is unknown, or it has quantized layers.
    """

    def __init__(self, model: Any, round_to: int) -> None:
        self.model, self.round_to, self.width = model, round_to, hidden_width(model)
        self.log_alpha = nn.Parameter(torch.full((self.width,), INITIAL_LOG_ALPHA))
        self._set(torch.ones(self.width))

    def expected_keep_ratio(self) -> Tensor:
        """Return the expected fraction of kept channels, a scalar with a gradient."""
        return open_probability(self.log_alpha).mean()

    @torch.no_grad()
    def kept_channels(self) -> Tensor:
        """Return the kept channels, int64, ascending; their number is the expected one."""
        return most_open(self.log_alpha, self.round_to)

    @torch.no_grad()
    def final_mask(self) -> Tensor:
        """Return the final, deterministic mask, float [D]."""
        return deterministic_mask_at(self.log_alpha, self.kept_channels())

    @contextlib.contextmanager
    def masked_training(self) -> Iterator[None]:
        """Mask the model in this context, with a new sample for each forward pass in training."""
        model = self.model
        self._set(self.final_mask())
        handles: list[Any] = [model.register_forward_pre_hook(self._sample)]
        handles += [m.register_forward_hook(partial(self._mask_output, True)) for m in self._producers()]
        handles += [
            m.register_forward_hook(partial(self._mask_output, False)) for m in self._sinusoidal_tables()
        ]
        handles += [m.register_forward_pre_hook(self._mask_input) for m in self._tied_outputs()]
        for norm in hidden_norms(model):
            handles += [
                norm.register_forward_pre_hook(self._select_open),
                norm.register_forward_hook(self._norm_output),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def fold_into_weights(self) -> None:
        """Multiply the mask into the weights whose outputs it multiplies."""
        family: Any = family_of(self.model)
        plus_one = set(hidden_norms(self.model)) if family.rms_norm.adds_one_to_weight else set()
        values = self.final_mask()
        for axis, tensor in self._producing_tensors():
            shape = [-1 if dim == axis.dim else 1 for dim in range(tensor.dim())]
            mask = values.to(tensor).view(shape)
            if self.model.get_submodule(axis.name.rpartition(".")[0]) in plus_one:
                tensor.mul_(mask).add_(mask - 1)
            else:
                tensor.mul_(mask)

    @contextlib.contextmanager
    def as_stored(self, edits: list[Edit]) -> Iterator[None]:
        """Narrow the model in this context to its stored width, and record it in `edits`."""
        before = [(tensor, tensor.detach().clone()) for _, tensor in self._producing_tensors()]
        self.fold_into_weights()
        try:
            with temporary_hidden_width(self.model, self.kept_channels().tolist()) as edit:
                edits.append(edit)
                try:
                    yield
                finally:
                    edits.pop()
        finally:
            for tensor, values in before:
                tensor.data.copy_(values)

    def cut(self, edits: list[Edit]) -> dict[str, int]:
        """Remove the closed channels in place; append the edit, and return the details."""
        keep = self.kept_channels().tolist()
        if len(keep) < self.width:
            edits[:] = write_width_to_config(self.model, edits, prune_hidden_width(self.model, keep))
        return {"width_before": self.width, "width_after": len(keep)}

    def _sample(self, model: nn.Module, _: Any) -> None:
        self._set(sample_mask(self.log_alpha) if model.training else self.final_mask())

    def _set(self, mask: Tensor) -> None:
        self._mask = mask
        self._open = mask.detach() > 0
        # the norm then only uses open channels
        self._grow = (self.width / self._open.sum().clamp(min=1)).sqrt()

    def _mask_output(self, soft: bool, _: nn.Module, __: Any, given: Tensor) -> Tensor:
        return given * (self._mask if soft else self._open).to(given.dtype)

    def _mask_input(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * self._mask.to(inputs[0].dtype), *inputs[1:])

    def _select_open(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs[0]  # 0 in closed channels
        if isinstance(norm, nn.LayerNorm):
            mean = x.float().sum(dim=-1, keepdim=True) / self._open.sum().clamp(min=1)
            x = (x - mean.to(x.dtype)) * self._open.to(x.dtype)
        return (x * self._grow, *inputs[1:])

    def _norm_output(self, norm: nn.Module, _: Any, given: Tensor) -> Tensor:
        bias = getattr(norm, "bias", None)
        found = given / self._grow if bias is None else (given - bias) / self._grow + bias
        return found * self._mask.to(found.dtype)

    def _producers(self) -> Iterable[nn.Module]:
        """Return the modules that output hidden states: embeddings, other tensors' owners, output layers."""
        names = [p.linear_layers[-1] for block in blocks_of(self.model) for p in block.parts]
        sines = set(self._sinusoidal_tables())
        for stack in self._stacks():
            names += [table.rpartition(".")[0] for table in stack.stream.embeddings]
            if stack.stream.other_tensors:
                names.append(_owner_module([name for name, _ in stack.stream.other_tensors]))
        modules = dict.fromkeys(self.model.get_submodule(name) for name in names)
        return [module for module in modules if module not in sines]

    def _sinusoidal_tables(self) -> Iterable[nn.Module]:
        family: Any = family_of(self.model)
        tables = [table for stack in self._stacks() for table in stack.stream.embeddings[1:]]
        owners = [self.model.get_submodule(table.rpartition(".")[0]) for table in tables]
        return dict.fromkeys(owners) if family.position_encoding.is_sinusoidal else {}

    def _tied_outputs(self) -> Iterable[nn.Module]:
        """Return the linear layers that read hidden states with a tied embedding matrix."""
        giving = {(axis.names, axis.dim) for axis, _ in self._producing_tensors()}
        names = [
            name
            for axis in hidden_axes(self.model)
            if axis.is_input and (axis.names, axis.dim) in giving
            for name in axis.names
        ]
        owners = dict.fromkeys(self.model.get_submodule(name.rpartition(".")[0]) for name in names)
        return [module for module in owners if isinstance(module, nn.Linear)]

    def _producing_tensors(self) -> list[tuple[HiddenAxis, Tensor]]:
        """Return the tensors that output, normalize or add to hidden states, without unstored sinusoids."""
        sines = {id(t) for m in self._sinusoidal_tables() for t in (*m.parameters(), *m.buffers())}
        found = []
        for axis in hidden_axes(self.model):
            owner, _, last = axis.name.rpartition(".")
            tensor: Tensor = getattr(self.model.get_submodule(owner), last)
            if axis.stream == "hidden" and not axis.is_input and id(tensor) not in sines:
                found.append((axis, tensor))
        return found

    def _stacks(self) -> Any:
        family: Any = family_of(self.model)
        return family.stacks(self.model.config.to_dict())


def _owner_module(names: list[str]) -> str:
    """Return the innermost module that contains all these tensors."""
    owners = [name.split(".")[:-1] for name in names]
    same = [parts[0] for parts in zip(*owners, strict=False) if len(set(parts)) == 1]
    return ".".join(same)
