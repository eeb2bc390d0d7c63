"""A quantized matrix, in the layout of its scheme, as part of a layer.

Shapes: K = inputs, N = outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from smelt.core.packages import require_package
from smelt.runtime.schemes.registry import is_row_independent, validate_scheme_options
from smelt.runtime.schemes.scheme import MatrixUse, Scheme, SchemeOptions, UnpackedWeights


class QuantizedMatrix(nn.Module):
    """The tensors of a matrix [N, K] in the layout of a scheme; see its `stored_tensors`.

    A module of its own, so that an embedding and the output layer tied to it can hold the same
    one (edit `share`).
    """

    codes: nn.Parameter
    scales: nn.Parameter

    def __init__(
        self,
        scheme: Scheme,
        rows: int,
        width: int,
        options: SchemeOptions,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        validate_scheme_options(scheme, options)
        for package, oldest in scheme.packages.items():
            require_package(package, oldest, f"scheme {scheme.name}")
        self.scheme, self.width, self.options = scheme, width, dict(options)
        self.variant = ""
        for name, stored in scheme.stored_tensors(rows, width, options).items():
            kind: torch.dtype = getattr(torch, stored.dtype)
            make = torch.ones if kind.is_floating_point else torch.zeros
            room = make(stored.shape, dtype=kind, device=device)
            self.register_parameter(name, nn.Parameter(room, requires_grad=False))
        self._kept: dict[str, tuple[list[int], Tensor]] = {}

    def set_weight_(self, decided: UnpackedWeights) -> None:
        """Store the weights computed by a quantization method; calibrated tensors are kept."""
        self._assign_tensors(self.scheme.pack(decided, self.options))

    def set_activation_range_(self, largest: float) -> None:
        """Set the activation range to `largest` on both sides, where the scheme needs it."""
        self._assign_tensors(self.scheme.activation_tensors(largest))

    def _assign_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.get_parameter(name).data = tensor
        self._kept.clear()
        self._buffers.clear()  # the previous graph form

    def select_variant(self, form: str) -> None:
        """Select one of the scheme's `operator_variants` for computation and export."""
        self.variant = form
        self._buffers.clear()

    def unpack(self) -> UnpackedWeights:
        """Return the unpacked quantized weights, and their scales and zero points."""
        return self.scheme.unpack(self)

    def dequantize(self) -> Tensor:
        """Return the values, float32 [N, K]."""
        codes, grid = self.unpack()
        return self.scheme.dequantize(codes, grid, self.options).flatten(1)[:, : self.width]

    def dequantized(self) -> Tensor:
        """Return `dequantize()`, computed once for the same memory."""
        return self.cached("values", self.dequantize)

    def dequantized_uncached(self) -> Tensor:
        """Return `dequantized()` where layers of the scheme cache it, else `dequantize()` without caching."""
        return self.dequantized() if "values" in self._kept else self.dequantize()

    def cached(self, word: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of `make`, computed once for the same memory of the parameters."""
        place = [p.data_ptr() for p in self._parameters.values() if p is not None]
        kept = self._kept.get(word)
        if kept is None or kept[0] != place:
            kept = self._kept[word] = (place, make())
        return kept[1]

    def is_row_independent(self) -> bool:
        """Return whether the quantized weights and scales of a row depend on that row only."""
        return is_row_independent(self.scheme, self.width, self.options)

    def has(self, name: str) -> bool:
        """Return whether there is a tensor `name`, stored or in the graph's form."""
        return name in self._parameters or name in self._buffers

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, stored or in the graph's form."""
        found: Tensor | None = self._parameters.get(name)  # getattr of nn.Module takes a microsecond
        found = self._buffers.get(name) if found is None else found
        if found is None:
            raise KeyError(f"a matrix of scheme {self.scheme.name} has no tensor '{name}' now")
        return found

    def prepare_export(self, use: MatrixUse, target: str = "") -> None:
        """Store the graph's constants in their exported form, so that constants have names of their own."""
        wanted = self.scheme.export_constants(self, use) | self.scheme.target_constants(target, self, use)
        for name, tensor in wanted.items():
            if not self.has(name):
                self.register_buffer(name, tensor, persistent=False)
        for name in sorted(self._buffers):  # in any order of requests, graphs list constants in this order
            self._buffers[name] = self._buffers.pop(name)

    def describe(self) -> str:
        """Return the scheme and its options, for the representation of a layer."""
        told = dict(self.options)
        return ", ".join([self.scheme.name, *([str(told)] if told else [])])
