"""Quantized layers, in any scheme, that compute in torch what the runtime will compute.

A layer may have a low-rank correction that stays float, or be the sum of two: one quantized matrix becomes
two of fewer bits. Schemes are defined in `smelt/quantization/schemes`; the quantized weights and scales of a
layer are computed in compress/quantize.

Shapes: K = inputs, N = outputs, r = rank of a correction, V = rows of an embedding, D = its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.core.messages import with_article
from smelt.models.layers import LowRankLinear
from smelt.quantization import emit
from smelt.quantization.matrix import QuantizedConv2d, QuantizedMatrix
from smelt.quantization.scheme import SchemeOptions
from smelt.quantization.schemes.registry import find_scheme


class QuantizedLinear(nn.Module):
    """y = x W^T + b with the weights, and perhaps the activations, of a scheme."""

    weight = None  # T5 reads the type of its layers' weight, and skips layers without one

    def __init__(self, in_features: int, bias: bool, matrix: QuantizedMatrix) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, matrix.codes.shape[0]
        self.matrix = matrix
        self.bias = nn.Parameter(torch.zeros(self.out_features, device=matrix.codes.device)) if bias else None

    def with_outputs(self, out_features: int, bias: bool) -> QuantizedLinear:
        """Return a layer of the same kind with other outputs, on the meta device."""
        old = self.matrix
        matrix = QuantizedMatrix(
            old.scheme, out_features, self.in_features, old.options, torch.device("meta")
        )
        return QuantizedLinear(self.in_features, bias, matrix)

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [..., K] to float32 [..., N]."""
        matrix, target = self.matrix, emit.export_target()
        if target is not None:
            return matrix.scheme.emit_linear(matrix, x, self.bias, target)
        if torch.is_grad_enabled() and (
            x.requires_grad or (self.bias is not None and self.bias.requires_grad)
        ):
            out: Tensor = _QuantizedMatMul.apply(x, self.bias, matrix)  # type: ignore[no-untyped-call]
            return out
        return matrix.scheme.linear(matrix, x, self.bias)

    def set_activation_range_(self, largest: float) -> None:
        """Set the activation range to `largest` on both sides, where the scheme needs it."""
        self.matrix.set_activation_range_(largest)

    def prepare_export(self, target: str) -> None:
        """Convert weights and scales to the form of a graph for `target`."""
        self.matrix.prepare_export("product", target)

    def extra_repr(self) -> str:
        """Return the sizes and the scheme, for printing."""
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.matrix.describe()}"
        )


class _QuantizedMatMul(torch.autograd.Function):
    """A quantized matrix multiplication; its gradient is that of the dequantized weights.

    The rounding of activations is ignored (straight-through), because it has no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, matrix: QuantizedMatrix) -> Tensor:
        ctx.matrix, ctx.kind = matrix, x.dtype
        return matrix.scheme.linear(matrix, x.float(), bias)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,) = outputs
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ ctx.matrix.dequantized_uncached().to(gradient.dtype)).to(ctx.kind)
        if ctx.needs_input_grad[1]:
            of_bias = gradient.flatten(0, -2).float().sum(dim=0)
        return of_x, of_bias, None


class QuantizedEmbedding(nn.Module):
    """An embedding of quantized rows, dequantized when looked up."""

    def __init__(self, width: int, padding_idx: int | None, matrix: QuantizedMatrix) -> None:
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
        """Convert weights and scales to the form of a graph for `target`."""
        self.matrix.prepare_export("lookup", target)

    def extra_repr(self) -> str:
        """Return the sizes and the scheme, for printing."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.matrix.describe()}"


def is_embedding_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Return whether `module` is a plain embedding, apart from BART's factor `embed_scale`."""
    scaled = isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    return type(module) is nn.Embedding or scaled


def copy_embed_scale(new: nn.Module, old: nn.Module) -> None:
    """Copy the factor of the rows of the embedding `old` to its replacement `new`."""
    scale = float(getattr(old, "embed_scale", 1.0))  # Gemma has a buffer, which would move with the module
    if scale != 1.0:
        setattr(new, "embed_scale", scale)  # noqa: B010  (nn.Module's attributes are typed as modules)
        new.register_forward_hook(partial(_scale_rows, scale))


def _scale_rows(scale: float, module: nn.Module, inputs: tuple[Tensor, ...], rows: Tensor) -> Tensor:
    return rows * scale


QuantizedLayer: TypeAlias = QuantizedLinear | QuantizedConv2d | QuantizedEmbedding


@runtime_checkable
class MasterWeightLayer(Protocol):
    """A layer that trains float master weights and computes like the quantized layer made from them."""

    weight: nn.Parameter

    @property
    def quantized(self) -> QuantizedLayer:
        """The quantized layer."""


def is_quantized(module: nn.Module) -> TypeGuard[QuantizedLayer]:
    """Return whether `module` is a quantized layer."""
    return isinstance(module, QuantizedLayer)


def layer_scheme(module: nn.Module) -> str | None:
    """Return the name of a quantized layer's scheme, None for any other module."""
    return module.matrix.scheme.name if is_quantized(module) else None


def empty_quantized(module: nn.Module, scheme: str, options: SchemeOptions) -> QuantizedLayer:
    """Return the quantized counterpart of `module`, with empty weights, on the same device.

    Args:
        module: a Linear, a Conv2d or an Embedding.
        scheme: how its weights are stored.
        options: all options of the scheme.

    Raises:
        InputError: an unknown scheme or option, or a module that the scheme does not support.
    """
    kind = find_scheme(scheme)
    if isinstance(module, nn.Linear):
        matrix = QuantizedMatrix(kind, module.out_features, module.in_features, options, module.weight.device)
        return QuantizedLinear(module.in_features, module.bias is not None, matrix)
    if isinstance(module, nn.Conv2d) and kind.supports_conv:
        width = module.weight[0].numel()
        return QuantizedConv2d(
            module, QuantizedMatrix(kind, module.out_channels, width, options, module.weight.device)
        )
    if is_embedding_table(module) and kind.supports_embeddings:
        matrix = QuantizedMatrix(
            kind, module.num_embeddings, module.embedding_dim, options, module.weight.device
        )
        table = QuantizedEmbedding(module.embedding_dim, module.padding_idx, matrix)
        copy_embed_scale(table, module)
        return table
    fit = "a Linear or an Embedding" if kind.supports_embeddings else "a Linear"
    raise InputError(
        f"scheme {scheme}: {with_article(type(module).__name__)} cannot be quantized; expected {fit}.",
        code="unsupported-layer",
    )


def concat_quantized(linears: Sequence[nn.Module]) -> QuantizedLinear | None:
    """Return several quantized layers of one input as one, or None where their kinds differ."""
    parts = [m for m in linears if isinstance(m, QuantizedLinear)]
    if not parts or len(parts) < len(linears):
        return None  # low-rank factors, or a layer that quantization skipped
    matrices = [m.matrix for m in parts]
    first, options = matrices[0], matrices[0].options
    if any(m.scheme.name != first.scheme.name or m.options != options for m in matrices):
        return None
    biases = [m.bias for m in parts]
    new = parts[0].with_outputs(sum(m.out_features for m in parts), any(b is not None for b in biases))
    for name, stored in first.scheme.stored_tensors(len(first.codes), first.width, options).items():
        tensors = [m.tensor(name) for m in matrices]
        alike = stored.calibrated or not stored.per_row
        if alike and not all(t.equal(tensors[0]) for t in tensors):
            return None
        whole = tensors[0] if alike else torch.cat(tensors)
        setattr(new.matrix, name, nn.Parameter(whole, requires_grad=False))
    if new.bias is not None:
        zeros = [torch.zeros(m.out_features) if m.bias is None else m.bias.detach() for m in parts]
        new.bias = nn.Parameter(torch.cat(zeros), requires_grad=False)
    return new


class LowRankCorrectedLinear(nn.Module):
    """y = coded(x) + adapter(x), both [..., K] -> [..., N]; the bias is that of `coded`.

    The correction is a trained adapter (smelt/training/lora.py), or compensates quantization error
    (compress/quantize/low_rank_correction.py).

    The adapter that training added to quantized weights is kept separate. Merged, the sum would have to be
    quantized again, with an error as large as the one that the adapter was trained to compensate.
    """

    weight = None  # T5 reads the type of its layers' weight, and skips layers without one

    def __init__(self, coded: QuantizedLinear, rank: int) -> None:
        """Add an adapter of a rank, with room for its weights, to `coded`, on the same device."""
        super().__init__()
        self.coded = coded
        pair = LowRankLinear(coded.in_features, coded.out_features, rank, bias=False)
        self.adapter = pair.to(coded.matrix.codes.device)

    @property
    def in_features(self) -> int:
        """Return K."""
        return self.coded.in_features

    @property
    def out_features(self) -> int:
        """Return N."""
        return self.coded.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        out: Tensor = self.coded(x) + self.adapter(x)
        return out


def with_low_rank_correction(quantized: QuantizedLinear, up: Tensor, down: Tensor) -> LowRankCorrectedLinear:
    """Return `quantized` with the correction `up`, float [N, r], and `down`, float [r, K], in its mode."""
    new = LowRankCorrectedLinear(quantized, len(down))
    new.adapter.up.weight.data, new.adapter.down.weight.data = up.detach().clone(), down.detach().clone()
    return new.train(quantized.training)


class SplitLinear(nn.Module):
    """y = first(x) + second(x), both [..., K] -> [..., N]; the bias is that of `first`."""

    weight = None  # T5 reads the type of its layers' weight, and skips layers without one

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    @property
    def in_features(self) -> int:
        """Return K."""
        return int(self.first.in_features)  # type: ignore[arg-type]

    @property
    def out_features(self) -> int:
        """Return N."""
        return int(self.first.out_features)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K] to [..., N]."""
        out: Tensor = self.first(x) + self.second(x)
        return out


def make_split_linear(layer: nn.Linear) -> SplitLinear:
    """Return two Linears of the size of `layer`, the first with its bias if any; values are not copied."""
    kind = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    first = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, **kind)
    return SplitLinear(first, nn.Linear(layer.in_features, layer.out_features, bias=False, **kind))
