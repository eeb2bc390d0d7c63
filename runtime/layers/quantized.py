"""Layers of codes and scales, in any scheme, that compute in torch what the runtime will compute.

What a scheme is, stands in `runtime/schemes`; which codes and scales a layer gets is decided in
compress/quantize.

Shapes: K = inputs, N = outputs, V = rows of an embedding, D = its width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.core.packages import require
from smelt.core.text import article
from smelt.runtime.layers import emit
from smelt.runtime.schemes.registry import check_options, decided_by_row, defaults, find, written
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
        self.scheme, self.width, self.options = scheme, width, defaults(scheme) | dict(options)
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
        told = written(self.scheme, self.options)
        return ", ".join([self.scheme.name, *([str(told)] if told else [])])


class QuantizedLinear(nn.Module):
    """y = x W^T + b with the weights, and perhaps the activations, of a scheme."""

    weight = None  # T5 asks its layers for the type of their weight, and goes on where there is none

    def __init__(self, in_features: int, bias: bool, matrix: Matrix) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, matrix.codes.shape[0]
        self.matrix = matrix
        self.bias = nn.Parameter(torch.zeros(self.out_features, device=matrix.codes.device)) if bias else None

    def like(self, out_features: int, bias: bool) -> QuantizedLinear:
        """Return a layer of the same kind with other outputs, on the meta device."""
        old = self.matrix
        matrix = Matrix(old.scheme, out_features, self.in_features, old.options, torch.device("meta"))
        return QuantizedLinear(self.in_features, bias, matrix)

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [..., K] to float32 [..., N]."""
        matrix, target = self.matrix, emit.export_target()
        if target is not None:
            return matrix.scheme.emit_product(matrix, x, self.bias, target)
        if torch.is_grad_enabled() and (
            x.requires_grad or (self.bias is not None and self.bias.requires_grad)
        ):
            out: Tensor = _ThroughCodes.apply(x, self.bias, matrix)  # type: ignore[no-untyped-call]
            return out
        return matrix.scheme.product(matrix, x, self.bias)

    def extra_repr(self) -> str:
        """Say the sizes and the scheme."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.matrix.said()}"


class _ThroughCodes(torch.autograd.Function):
    """A product of codes; backwards it is the product with what they stand for.

    What rounding activations does is looked through (straight-through): rounding itself has no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, matrix: Matrix) -> Tensor:
        ctx.matrix, ctx.kind = matrix, x.dtype
        return matrix.scheme.product(matrix, x.float(), bias)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,) = outputs
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ ctx.matrix.values_for_once().to(gradient.dtype)).to(ctx.kind)
        if ctx.needs_input_grad[1]:
            of_bias = gradient.flatten(0, -2).float().sum(dim=0)
        return of_x, of_bias, None


class QuantizedEmbedding(nn.Module):
    """An embedding of rows of codes, dequantized when looked up."""

    def __init__(self, width: int, padding_idx: int | None, matrix: Matrix) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = matrix.codes.shape[0], width
        self.padding_idx = padding_idx
        self.matrix = matrix

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 [...] to float32 [..., D]."""
        matrix, target = self.matrix, emit.export_target()
        if target is not None:
            return matrix.scheme.emit_lookup(matrix, ids, target)
        return matrix.scheme.lookup(matrix, ids)

    def extra_repr(self) -> str:
        """Say the sizes and the scheme."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.matrix.said()}"


def is_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Say whether `module` looks rows up and does no more, but for BART's factor `embed_scale`."""
    scaled = isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    return type(module) is nn.Embedding or scaled


def keep_scale(new: nn.Module, old: nn.Module) -> None:
    """Let `new`, which takes the place of the embedding `old`, multiply its rows by the same factor."""
    scale = float(getattr(old, "embed_scale", 1.0))  # Gemma has a buffer, which would move with the module
    if scale != 1.0:
        setattr(new, "embed_scale", scale)  # noqa: B010  (nn.Module's attributes are typed as modules)
        new.register_forward_hook(partial(_times, scale))


def _times(scale: float, module: nn.Module, inputs: tuple[Tensor, ...], rows: Tensor) -> Tensor:
    return rows * scale


def is_quantized(module: nn.Module) -> TypeGuard[QuantizedLinear | QuantizedEmbedding]:
    """Say whether `module` is a layer of codes."""
    return isinstance(module, QuantizedLinear | QuantizedEmbedding)


def scheme_of(module: nn.Module) -> str | None:
    """Return the name of a quantized layer's scheme, None for any other module."""
    return module.matrix.scheme.name if is_quantized(module) else None


def empty_quantized(module: nn.Module, scheme: str, options: Options) -> QuantizedLinear | QuantizedEmbedding:
    """Return the quantized counterpart of `module` with room for its codes, on the same device.

    Args:
        module: a Linear or an Embedding.
        scheme: how its weights are stored.
        options: all that the scheme wants to know besides.

    Raises:
        InputError: an unknown scheme or option, or a module that the scheme does not know.
    """
    kind = find(scheme)
    if isinstance(module, nn.Linear):
        matrix = Matrix(kind, module.out_features, module.in_features, options, module.weight.device)
        return QuantizedLinear(module.in_features, module.bias is not None, matrix)
    if is_table(module) and kind.tables:
        matrix = Matrix(kind, module.num_embeddings, module.embedding_dim, options, module.weight.device)
        table = QuantizedEmbedding(module.embedding_dim, module.padding_idx, matrix)
        keep_scale(table, module)
        return table
    fit = "a Linear or an Embedding" if kind.tables else "a Linear"
    raise InputError(
        f"scheme {scheme}: {article(type(module).__name__)} cannot be quantized; expected {fit}."
    )


def matrix_types(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the types in which the tensors of quantized matrices are stored, by tensor name."""
    types = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Matrix):
            stored = module.scheme.storage(len(module.codes), module.width, module.options)
            for part, one in stored.items():
                types[f"{name}.{part}"] = getattr(torch, one.filed or one.dtype)
    return types


def matrix_bytes(model: nn.Module) -> int:
    """Return the bytes that the codes and scales of `model` take in a file, shared ones counted once."""
    types = matrix_types(model)
    return sum(p.numel() * types[n].itemsize for n, p in model.named_parameters() if n in types)


def joined(linears: Sequence[nn.Module]) -> QuantizedLinear | None:
    """Return several quantized layers of one input as one, or None where they are not of one kind."""
    parts = [m for m in linears if isinstance(m, QuantizedLinear)]
    if not parts or len(parts) < len(linears):
        return None  # low-rank factors, or a layer that quantization skipped
    matrices = [m.matrix for m in parts]
    first, options = matrices[0], matrices[0].options
    if any(m.scheme.name != first.scheme.name or m.options != options for m in matrices):
        return None
    biases = [m.bias for m in parts]
    new = parts[0].like(sum(m.out_features for m in parts), any(b is not None for b in biases))
    for name, stored in first.scheme.storage(len(first.codes), first.width, options).items():
        tensors = [m.tensor(name) for m in matrices]
        alike = stored.measured or not stored.by_row
        if alike and not all(t.equal(tensors[0]) for t in tensors):
            return None
        whole = tensors[0] if alike else torch.cat(tensors)
        setattr(new.matrix, name, nn.Parameter(whole, requires_grad=False))
    if new.bias is not None:
        zeros = [torch.zeros(m.out_features) if m.bias is None else m.bias.detach() for m in parts]
        new.bias = nn.Parameter(torch.cat(zeros), requires_grad=False)
    return new
