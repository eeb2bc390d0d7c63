"""A matrix of codes and scales, in the layout of its scheme, as layers hold one.

Shapes: K = inputs, N = outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from smelt.core.packages import require
from smelt.runtime.schemes.registry import check_options, decided_by_row
from smelt.runtime.schemes.scheme import Codes, Options, Scheme, Use


class Matrix(nn.Module):
    """The tensors of a matrix [N, K] in the layout of a scheme; see its `storage`.

    A module of its own, so that an embedding and the output head tied to it can hold the very same
    one (edit `share`).
    """

    codes: nn.Parameter
    scales: nn.Parameter

    def __init__(
        self, scheme: Scheme, rows: int, width: int, options: Options, device: torch.device | None = None
    ) -> None:
        super().__init__()
        check_options(scheme, options)
        for package, oldest in scheme.packages.items():
            require(package, oldest, f"scheme {scheme.name}")
        self.scheme, self.width, self.options = scheme, width, dict(options)
        self.form = ""
        for name, stored in scheme.storage(rows, width, options).items():
            kind: torch.dtype = getattr(torch, stored.dtype)
            make = torch.ones if kind.is_floating_point else torch.zeros
            room = make(stored.shape, dtype=kind, device=device)
            self.register_parameter(name, nn.Parameter(room, requires_grad=False))
        self._kept: dict[str, tuple[list[int], Tensor]] = {}

    def set_(self, decided: Codes) -> None:
        """Take over what a method decided; what was measured stays."""
        self._take(self.scheme.pack(decided, self.options))

    def set_range_(self, largest: float) -> None:
        """Let activations lie between -`largest` and `largest`, where the scheme wants to know it."""
        self._take(self.scheme.ranged(largest))

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.get_parameter(name).data = tensor
        self._kept.clear()
        self._buffers.clear()  # the graph's form of what was

    def choose_form(self, form: str) -> None:
        """Let products be computed, and leave, in one of the scheme's `forms`."""
        self.form = form
        self._buffers.clear()

    def decided(self) -> Codes:
        """Return the codes one by one, and their grid."""
        return self.scheme.unpack(self)

    def dequantize(self) -> Tensor:
        """Return the values, float32 [N, K]."""
        codes, grid = self.decided()
        return self.scheme.values(codes, grid, self.options).flatten(1)[:, : self.width]

    def values(self) -> Tensor:
        """Return `dequantize()`, computed once for the same memory."""
        return self.once("values", self.dequantize)

    def values_for_once(self) -> Tensor:
        """Return `values()` where products of the scheme keep them, else `dequantize()`, and keep nothing."""
        return self.values() if "values" in self._kept else self.dequantize()

    def once(self, word: str, make: Callable[[], Tensor]) -> Tensor:
        """Return what `make` gives, computed once for the same memory of the parameters."""
        place = [p.data_ptr() for p in self._parameters.values() if p is not None]
        kept = self._kept.get(word)
        if kept is None or kept[0] != place:
            kept = self._kept[word] = (place, make())
        return kept[1]

    def decided_by_row(self) -> bool:
        """Say whether the codes and scales of a row depend on that row alone."""
        return decided_by_row(self.scheme, self.width, self.options)

    def has(self, name: str) -> bool:
        """Say whether there is a tensor `name`, stored or in the graph's form."""
        return name in self._parameters or name in self._buffers

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, stored or in the graph's form."""
        found: Tensor | None = self._parameters.get(name)  # getattr of nn.Module takes a microsecond
        found = self._buffers.get(name) if found is None else found
        if found is None:
            raise KeyError(f"a matrix of scheme {self.scheme.name} has no tensor '{name}' now")
        return found

    def prepare_export(self, use: Use, target: str = "") -> None:
        """Keep what the graph wants in the form that it wants: so constants have names of their own."""
        wanted = self.scheme.graph_tensors(self, use) | self.scheme.tensors_for(target, self, use)
        for name, tensor in wanted.items():
            if not self.has(name):
                self.register_buffer(name, tensor, persistent=False)
        for name in sorted(self._buffers):  # whoever asked first: graphs list constants in this order
            self._buffers[name] = self._buffers.pop(name)

    def said(self) -> str:
        """Return the scheme and its options, for the representation of a layer."""
        told = dict(self.options)
        return ", ".join([self.scheme.name, *([str(told)] if told else [])])
