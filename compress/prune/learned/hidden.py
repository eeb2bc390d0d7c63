"""The mask of the hidden width: one for all channels of the hidden states, of encoder and decoder together.

A channel runs through all blocks, so that its mask z is the same wherever it is. It multiplies what
embeddings give, what each attention and feed-forward part adds, and what each norm gives; norms look at the
channels that are open alone (z > 0), so that a model without the others computes the same:

    y = (x - mean of open x) / sqrt(var of open x + eps) * w + b        0 where z = 0; then times z

A matrix that is embedding and head at once takes z as one, so that the head's inputs are multiplied with it
too; sines of positions, which no file holds, are 0 where z is, and as they were elsewhere.

Sources: CoFi, Xia et al. 2022, arXiv:2204.00408, modeling_bert.py; where norms stand first Sheared LLaMA, Xia
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

from smelt.compress.prune.learned.hard_concrete import OPEN, draw_mask, likeliest, open_chance, settled_at
from smelt.compress.prune.width.scores import hidden_norms
from smelt.families.registry import family_of
from smelt.families.walk import blocks_of
from smelt.runtime.models.axes import Axis, hidden_axes
from smelt.runtime.models.edits.narrow import narrow, narrowed, say_width_in_config, width_of
from smelt.runtime.models.structure import Edit


class HiddenMask:
    """The mask of one model's hidden width while it trains.

    Args:
        model: float, changed when the mask settles.
        round_to: channels that stay are a multiple of it.

    Raises:
        InputError: a family whose layers are not known, or integer codes.
    """

    def __init__(self, model: Any, round_to: int) -> None:
        self.model, self.round_to, self.width = model, round_to, width_of(model)
        self.log_alpha = nn.Parameter(torch.full((self.width,), OPEN))
        self._set(torch.ones(self.width))

    def expected(self) -> Tensor:
        """Return the fraction of the channels that is expected to stay, a scalar with a gradient."""
        return open_chance(self.log_alpha).mean()

    @torch.no_grad()
    def kept(self) -> Tensor:
        """Return the channels that stay, int64, rising: as many as are expected to."""
        return likeliest(self.log_alpha, self.round_to)

    @torch.no_grad()
    def values(self) -> Tensor:
        """Return the mask as it will be when it has settled, float [D]."""
        return settled_at(self.log_alpha, self.kept())

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Let what the model computes be masked, by one draw each time that it is called in training."""
        model = self.model
        self._set(self.values())
        handles: list[Any] = [model.register_forward_pre_hook(self._begin)]
        handles += [m.register_forward_hook(partial(self._mask_given, True)) for m in self._givers()]
        handles += [m.register_forward_hook(partial(self._mask_given, False)) for m in self._sines()]
        handles += [m.register_forward_pre_hook(self._mask_read) for m in self._tied()]
        for norm in hidden_norms(model):
            handles += [
                norm.register_forward_pre_hook(self._of_open),
                norm.register_forward_hook(self._given),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def into_weights(self) -> None:
        """Multiply the weights with the mask, wherever it would multiply what they give."""
        family: Any = family_of(self.model)
        plus_one = set(hidden_norms(self.model)) if family.rms_norm.plus_one else set()
        values = self.values()
        for axis, tensor in self._giving():
            shape = [-1 if dim == axis.dim else 1 for dim in range(tensor.dim())]
            mask = values.to(tensor).view(shape)
            if self.model.get_submodule(axis.name.rpartition(".")[0]) in plus_one:
                tensor.mul_(mask).add_(mask - 1)
            else:
                tensor.mul_(mask)

    @contextlib.contextmanager
    def stored(self, edits: list[Edit]) -> Iterator[None]:
        """Let the model meanwhile be as narrow as it would be stored, and `edits` say so."""
        before = [(tensor, tensor.detach().clone()) for _, tensor in self._giving()]
        self.into_weights()
        try:
            with narrowed(self.model, self.kept().tolist()) as edit:
                edits.append(edit)
                try:
                    yield
                finally:
                    edits.pop()
        finally:
            for tensor, values in before:
                tensor.data.copy_(values)

    def cut(self, edits: list[Edit]) -> dict[str, int]:
        """Take the channels away that do not stay, in place; append the edit, and return the details."""
        keep = self.kept().tolist()
        if len(keep) < self.width:
            edits[:] = say_width_in_config(self.model, edits, narrow(self.model, keep))
        return {"width_before": self.width, "width_after": len(keep)}

    def _begin(self, model: nn.Module, _: Any) -> None:
        self._set(draw_mask(self.log_alpha) if model.training else self.values())

    def _set(self, mask: Tensor) -> None:
        self._mask = mask
        self._open = mask.detach() > 0
        # of a norm of all channels it makes one of those that are open
        self._grow = (self.width / self._open.sum().clamp(min=1)).sqrt()

    def _mask_given(self, soft: bool, _: nn.Module, __: Any, given: Tensor) -> Tensor:
        return given * (self._mask if soft else self._open).to(given.dtype)

    def _mask_read(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * self._mask.to(inputs[0].dtype), *inputs[1:])

    def _of_open(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs[0]  # 0 in channels that are closed
        if isinstance(norm, nn.LayerNorm):
            mean = x.float().sum(dim=-1, keepdim=True) / self._open.sum().clamp(min=1)
            x = (x - mean.to(x.dtype)) * self._open.to(x.dtype)
        return (x * self._grow, *inputs[1:])

    def _given(self, norm: nn.Module, _: Any, given: Tensor) -> Tensor:
        bias = getattr(norm, "bias", None)
        found = given / self._grow if bias is None else (given - bias) / self._grow + bias
        return found * self._mask.to(found.dtype)

    def _givers(self) -> Iterable[nn.Module]:
        """Return what gives hidden states: tables, what holds tensors beside them, the parts' products."""
        names = [p.products[-1] for block in blocks_of(self.model) for p in block.parts]
        sines = set(self._sines())
        for stack in self._stacks():
            names += [table.rpartition(".")[0] for table in stack.stream.tables]
            names += [_above([name for name, _ in stack.stream.beside])] if stack.stream.beside else []
        modules = dict.fromkeys(self.model.get_submodule(name) for name in names)
        return [module for module in modules if module not in sines]

    def _sines(self) -> Iterable[nn.Module]:
        family: Any = family_of(self.model)
        tables = [table for stack in self._stacks() for table in stack.stream.tables[1:]]
        owners = [self.model.get_submodule(table.rpartition(".")[0]) for table in tables]
        return dict.fromkeys(owners) if family.positions.computed else {}

    def _tied(self) -> Iterable[nn.Module]:
        """Return the products that read hidden states with a matrix that gives them too: a tied head."""
        giving = {(axis.names, axis.dim) for axis, _ in self._giving()}
        names = [
            name
            for axis in hidden_axes(self.model)
            if axis.reads and (axis.names, axis.dim) in giving
            for name in axis.names
        ]
        owners = dict.fromkeys(self.model.get_submodule(name.rpartition(".")[0]) for name in names)
        return [module for module in owners if isinstance(module, nn.Linear)]

    def _giving(self) -> list[tuple[Axis, Tensor]]:
        """Return the tensors that give, norm or add hidden states, but for sines that no file holds."""
        sines = {id(t) for m in self._sines() for t in (*m.parameters(), *m.buffers())}
        found = []
        for axis in hidden_axes(self.model):
            owner, _, last = axis.name.rpartition(".")
            tensor: Tensor = getattr(self.model.get_submodule(owner), last)
            if axis.stream == "hidden" and not axis.reads and id(tensor) not in sines:
                found.append((axis, tensor))
        return found

    def _stacks(self) -> Any:
        family: Any = family_of(self.model)
        return family.stacks(self.model.config.to_dict())


def _above(names: list[str]) -> str:
    """Return the module that holds all these tensors, in itself or in what is below it."""
    owners = [name.split(".")[:-1] for name in names]
    same = [parts[0] for parts in zip(*owners, strict=False) if len(set(parts)) == 1]
    return ".".join(same)
