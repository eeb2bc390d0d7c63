"""Layers of codes and scales, in any scheme, that compute in torch what the runtime will compute.

What a scheme is, stands in `runtime/schemes`; which codes and scales a layer gets is decided in
compress/quantize.

Shapes: K = inputs, N = outputs, V = rows of an embedding, D = its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.core.text import article
from smelt.runtime.layers import emit
from smelt.runtime.layers.matrix import Matrix
from smelt.runtime.layers.quantized_conv import QuantizedConv2d, Rounded
from smelt.runtime.schemes.registry import find
from smelt.runtime.schemes.scheme import Options


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

    def set_range_(self, largest: float) -> None:
        """Let activations lie between -`largest` and `largest`, where the scheme wants to know it."""
        self.matrix.set_range_(largest)

    def prepare_export(self, target: str) -> None:
        """Keep codes and scales in the form that a graph wants."""
        self.matrix.prepare_export("product", target)

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

    def prepare_export(self, target: str) -> None:
        """Keep codes and scales in the form that a graph wants."""
        self.matrix.prepare_export("lookup", target)

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


Quantized: TypeAlias = QuantizedLinear | QuantizedConv2d | QuantizedEmbedding


def is_quantized(module: nn.Module) -> TypeGuard[Quantized]:
    """Say whether `module` is a layer of codes."""
    return isinstance(module, Quantized)


def scheme_of(module: nn.Module) -> str | None:
    """Return the name of a quantized layer's scheme, None for any other module."""
    return module.matrix.scheme.name if is_quantized(module) else None


def empty_quantized(module: nn.Module, scheme: str, options: Options) -> Quantized:
    """Return the quantized counterpart of `module` with room for its codes, on the same device.

    Args:
        module: a Linear, a Conv2d or an Embedding.
        scheme: how its weights are stored.
        options: all that the scheme wants to know besides.

    Raises:
        InputError: an unknown scheme or option, or a module that the scheme does not know.
    """
    kind = find(scheme)
    if isinstance(module, nn.Linear):
        matrix = Matrix(kind, module.out_features, module.in_features, options, module.weight.device)
        return QuantizedLinear(module.in_features, module.bias is not None, matrix)
    if isinstance(module, nn.Conv2d) and kind.convolutions:
        width = module.weight[0].numel()
        return QuantizedConv2d(
            module, Matrix(kind, module.out_channels, width, options, module.weight.device)
        )
    if is_table(module) and kind.tables:
        matrix = Matrix(kind, module.num_embeddings, module.embedding_dim, options, module.weight.device)
        table = QuantizedEmbedding(module.embedding_dim, module.padding_idx, matrix)
        keep_scale(table, module)
        return table
    fit = "a Linear or an Embedding" if kind.tables else "a Linear"
    raise InputError(
        f"scheme {scheme}: {article(type(module).__name__)} cannot be quantized; expected {fit}.",
        code="unsupported-layer",
    )


def matrix_types(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the types in which the tensors of quantized matrices are stored, by tensor name."""
    types = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Matrix):
            stored = module.scheme.storage(len(module.codes), module.width, module.options)
            for part, one in stored.items():
                types[f"{name}.{part}"] = getattr(torch, one.filed or one.dtype)
        elif isinstance(module, Rounded):  # the same number as in what reads the same states
            types[f"{name}.scale"] = torch.float32
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
