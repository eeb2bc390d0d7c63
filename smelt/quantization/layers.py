"""Quantized layers, in any scheme, that compute in torch what the runtime will compute.

A layer may have a low-rank correction that stays float, or be the sum of two: one quantized matrix becomes
two of fewer bits. Schemes are defined in `smelt/quantization/schemes`; the quantized weights and scales of a
layer are computed in compress/quantize.

A convolution quantizes its input to 8 bits, and multiplies it with its quantized kernel. The branches of a
residual block are quantized before the sum, and the input of a max pool before the pool: so ONNX Runtime
keeps 8-bit values from one convolution to the next. Scale and zero point are those of int8-static
(`smelt/quantization/schemes/int8_static.py`); inputs that are never negative use all codes.

    x_q = clamp(round(x / scale) + zero point, -128, 127)

Source: Jacob et al. 2018, arXiv:1712.05877; ONNX operators QuantizeLinear, DequantizeLinear, QLinearConv.

Shapes: K = inputs, N = outputs, r = rank of a correction, V = rows of an embedding, D = its width; of a
convolution B = batch, S = input channels, T = output channels, h, w = height and width, D = taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.core.errors import InputError
from smelt.core.messages import with_article
from smelt.core.system import require_package
from smelt.quantization import emit
from smelt.quantization.scheme import (
    CONV_UNSUPPORTED_TARGETS,
    MatrixUse,
    PackedMatrix,
    Scheme,
    SchemeOptions,
    UnpackedWeights,
)
from smelt.quantization.schemes.int8 import ZEROS
from smelt.quantization.schemes.int8_static import (
    INPUT_SCALE,
    activation_qparams,
    input_zero_point,
    quantize_activations,
    unsigned_zero_point,
)
from smelt.quantization.schemes.registry import find_scheme, is_row_independent, validate_scheme_options

_WEIGHTS_AT_ONCE = 2**22  # packed or dequantized: several copies of them are in memory


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
        for package, min_version in scheme.packages.items():
            require_package(package, min_version, f"scheme {scheme.name}")
        self.scheme, self.width, self.options = scheme, width, dict(options)
        self.variant, self.caches_values = "", True
        for name, spec in scheme.stored_tensors(rows, width, options).items():
            kind: torch.dtype = getattr(torch, spec.dtype)
            make = torch.ones if kind.is_floating_point else torch.zeros
            empty_tensor = make(spec.shape, dtype=kind, device=device)
            self.register_parameter(name, nn.Parameter(empty_tensor, requires_grad=False))
        self._kept: dict[str, tuple[list[int], Tensor]] = {}

    def set_weight_(self, decided: UnpackedWeights) -> None:
        """Store the weights computed by a quantization method; calibrated tensors are kept."""
        count = len(decided.q_weight)
        step = max(1, _WEIGHTS_AT_ONCE // self.width) if self.is_row_independent() else count
        if step >= count:
            self._assign_tensors(self.scheme.pack(decided, self.options))
            return
        stored_tensors: dict[str, Tensor] = {}
        for begin in range(0, count, step):
            grid = {name: tensor[begin : begin + step] for name, tensor in decided.qparams.items()}
            weights_chunk = UnpackedWeights(decided.q_weight[begin : begin + step], grid)
            for name, tensor in self.scheme.pack(weights_chunk, self.options).items():
                if name not in stored_tensors:
                    self.get_parameter(name).data = tensor.new_empty(0)  # frees the previous values
                    stored_tensors[name] = tensor.new_empty(count, *tensor.shape[1:])
                stored_tensors[name][begin : begin + step] = tensor
        self._assign_tensors(stored_tensors)

    def set_activation_range_(self, low: float, high: float) -> None:
        """Set the activation range, where the scheme needs it."""
        self._assign_tensors(self.scheme.activation_tensors(low, high, self.options))

    def set_activation_scale_(self, scale: float) -> None:
        """Set the scale of statically quantized activations; their zero point is kept."""
        static_range = self.scheme.static_activation_range(self)
        assert static_range is not None
        static_range[0].data.fill_(scale)

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
        count = len(self.codes)
        step = max(1, _WEIGHTS_AT_ONCE // self.width) if self.is_row_independent() else count
        if step >= count:
            return _values(self.scheme, self, self.width)
        values = torch.empty(count, self.width, device=self.codes.device)
        for begin in range(0, count, step):
            matrix_rows = _MatrixRows(self, begin, begin + step)
            values[begin : begin + step] = _values(self.scheme, matrix_rows, self.width)
        return values

    def dequantized(self) -> Tensor:
        """Return `dequantize()`, computed once for the same memory unless `caches_values` is False."""
        return self.cached("values", self.dequantize) if self.caches_values else self.dequantize()

    def dequantized_uncached(self) -> Tensor:
        """Return `dequantized()` where layers of the scheme cache it, else `dequantize()` without caching."""
        return self.dequantized() if "values" in self._kept else self.dequantize()

    def cached(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of `make`, computed once for the same memory of the parameters."""
        addresses = [p.data_ptr() for p in self._parameters.values() if p is not None]
        entry = self._kept.get(key)
        if entry is None or entry[0] != addresses:
            entry = self._kept[key] = (addresses, make())
        return entry[1]

    def clear_cache(self) -> None:
        """Free what `cached` holds."""
        self._kept.clear()

    def is_row_independent(self) -> bool:
        """Return whether the quantized weights and scales of a row depend on that row only."""
        return is_row_independent(self.scheme, self.width, self.options)

    def has(self, name: str) -> bool:
        """Return whether there is a tensor `name`, stored or in the graph's form."""
        return name in self._parameters or name in self._buffers

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, stored or in the graph's form."""
        # getattr of nn.Module takes a microsecond; in `_parameters[name]` DeepSpeed gathers a divided one
        parameters = self._parameters
        value = parameters[name] if name in parameters else self._buffers.get(name)
        if value is None:
            raise KeyError(f"a matrix of scheme {self.scheme.name} has no tensor '{name}' now")
        return value

    def prepare_export(self, use: MatrixUse, target: str = "") -> None:
        """Store the graph's constants in their exported form, so that constants have names of their own."""
        constants = self.scheme.export_constants(self, use) | self.scheme.target_constants(target, self, use)
        for name, tensor in constants.items():
            if not self.has(name):
                self.register_buffer(name, tensor, persistent=False)
        for name in sorted(self._buffers):  # in any order of requests, graphs list constants in this order
            self._buffers[name] = self._buffers.pop(name)

    def describe(self) -> str:
        """Return the scheme and its options, for the representation of a layer."""
        options = dict(self.options)
        return ", ".join([self.scheme.name, *([str(options)] if options else [])])


class _MatrixRows:
    """The rows from `begin` to `end` of a matrix whose rows are independent, as a scheme accesses them."""

    def __init__(self, matrix: QuantizedMatrix, begin: int, end: int) -> None:
        self._matrix, self._rows = matrix, slice(begin, end)
        self.options, self.width, self.variant = matrix.options, matrix.width, matrix.variant
        specs = matrix.scheme.stored_tensors(len(matrix.codes), matrix.width, matrix.options)
        self._per_row = {name for name, tensor in specs.items() if tensor.per_row}

    def has(self, name: str) -> bool:
        """Return whether there is a tensor `name`."""
        return self._matrix.has(name)

    def tensor(self, name: str) -> Tensor:
        """Return the rows of a tensor, or the whole one if it has no rows."""
        value = self._matrix.tensor(name)
        return value[self._rows] if name in self._per_row else value

    def cached(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of `make`."""
        return make()

    def dequantized(self) -> Tensor:
        """Return the values of the rows, float32."""
        return _values(self._matrix.scheme, self, self.width)


def _values(scheme: Scheme, matrix: PackedMatrix, width: int) -> Tensor:
    q_weight, grid = scheme.unpack(matrix)
    return scheme.dequantize(q_weight, grid, matrix.options).flatten(1)[:, :width]


def limit_weight_cache(model: nn.Module, limit_bytes: int) -> None:
    """Stop caching float32 values of quantized matrices if all of them need more than `limit_bytes`.

    A matrix is then dequantized at each use. The results are the same.
    """
    matrices = {module for module in model.modules() if isinstance(module, QuantizedMatrix)}
    needed_bytes = sum(4 * len(matrix.codes) * matrix.width for matrix in matrices)
    for matrix in matrices:
        matrix.caches_values = needed_bytes <= limit_bytes


def _explicit_padding(convolution: nn.Conv2d) -> tuple[int, ...] | None:
    """Return the padding of each side of both axes; None where "same" has one more at the end."""
    if not isinstance(convolution.padding, str):
        return convolution.padding
    if convolution.padding == "valid":
        return (0, 0)
    sums = [d * (k - 1) for d, k in zip(convolution.dilation, convolution.kernel_size, strict=True)]
    return None if any(total % 2 for total in sums) else tuple(total // 2 for total in sums)


class QuantizedConv2d(nn.Module):
    """A quantized convolution: its kernel is a matrix [T, S * D * D] of a scheme."""

    def __init__(self, like: nn.Conv2d, matrix: QuantizedMatrix) -> None:
        super().__init__()
        padding = _explicit_padding(like)
        if like.padding_mode != "zeros" or padding is None:
            raise InputError(
                f"scheme {matrix.scheme.name}: only convolutions with zero padding, equal on both sides,"
                " can be quantized.",
                code="unsupported-layer",
            )
        self.in_channels, self.out_channels = like.in_channels, like.out_channels
        self.shape = tuple(like.weight.shape)
        # MobileNetV2 computes its padding from these
        self.stride, self.kernel_size, self.dilation = like.stride, like.kernel_size, like.dilation
        self.how: dict[str, Any] = {
            "stride": like.stride,
            "padding": padding,
            "dilation": like.dilation,
            "groups": like.groups,
        }
        self.matrix = matrix
        bias = torch.zeros(like.out_channels, device=matrix.codes.device)
        self.bias = nn.Parameter(bias) if like.bias is not None else None

    def fake_quantize_input(self, x: Tensor) -> Tensor:
        """Return float [B, S, h, w] after quantizing and dequantizing."""
        return self.matrix.scheme.fake_quantize_activations(self.matrix, x)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of `x` with a kernel given as a matrix [T, S * D * D]."""
        return F.conv2d(x, weight.view(self.shape), bias, **self.how)

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [B, S, h, w] to float32 [B, T, h', w']."""
        matrix, target = self.matrix, emit.export_target()
        scale = matrix.tensor(INPUT_SCALE)
        if target is not None:
            if target in CONV_UNSUPPORTED_TARGETS:
                raise InputError(f"onnx: {CONV_UNSUPPORTED_TARGETS[target]}.", code="unsupported-target")
            zeros = matrix.tensor(ZEROS) if matrix.has(ZEROS) else None
            weights = emit.WeightGrid(matrix.tensor("kernel"), matrix.tensor("scales"), zeros)
            kernel = emit.dequantize_rows(weights)
            activations = emit.ActivationGrid(scale, matrix.tensor("zero_point"))
            return F.conv2d(emit.quantize_dequantize(x, activations), kernel, self.bias, **self.how)
        steps = matrix.tensor("codes").float()
        if matrix.has(ZEROS):
            steps = steps - matrix.tensor(ZEROS).float()[:, None]
        sums = self.convolve(quantize_activations(matrix, x), steps, None)
        out = sums * (matrix.tensor("scales") * scale)[:, None, None]
        return out if self.bias is None else out + self.bias[:, None, None]

    def forward_float(self, x: Tensor) -> Tensor:
        """Return the same with float activations."""
        return self.convolve(x, self.matrix.dequantize(), self.bias)

    def prepare_export(self, target: str) -> None:
        """Convert the weights to the form of a graph for `target`."""
        if not self.matrix.has("kernel"):
            kernel = self.matrix.tensor("codes").detach().view(self.shape)
            self.matrix.register_buffer("kernel", kernel, persistent=False)
            zero = unsigned_zero_point(input_zero_point(self.matrix))
            self.matrix.register_buffer("zero_point", zero, persistent=False)

    def extra_repr(self) -> str:
        """Return the sizes and the scheme, for printing."""
        return f"{self.in_channels}, {self.out_channels}, {self.matrix.describe()}"


class QuantizedActivation(nn.Module):
    """Quantizes and dequantizes states before `inner` reads them.

    inner: identity, or a max pool. scale: float32 scalar. zero_point: uint8 scalar.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, inner: nn.Module, device: torch.device | None = None) -> None:
        super().__init__()
        if not isinstance(inner, nn.Identity | nn.MaxPool2d):
            raise TypeError("it is neither an identity nor a max pool")
        self.inner = inner
        self.register_buffer("scale", torch.ones((), device=device))
        self.register_buffer("zero_point", torch.zeros((), dtype=torch.uint8, device=device))

    def set_activation_range_(self, low: float, high: float, symmetric: bool) -> None:
        """Set the range; symmetric: without a zero point."""
        # computed as a scheme does, so that layers which read the same states have the same scale
        scale, zero = activation_qparams(low, high, symmetric)
        self.scale, self.zero_point = torch.tensor(scale), unsigned_zero_point(zero)

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [B, S, h, w] to `inner` of its quantized values; gradients are straight-through."""
        if emit.export_target() is not None:
            seen = emit.quantize_dequantize(x, emit.ActivationGrid(self.scale, self.zero_point))
        else:
            with torch.no_grad():
                zero = int(self.zero_point)
                seen = x.div(self.scale).round_().clamp_(-zero, 255 - zero).mul_(self.scale)
            seen = x + (seen - x).detach() if torch.is_grad_enabled() and x.requires_grad else seen
        out: Tensor = self.inner(seen)
        return out

    def forward_float(self, x: Tensor) -> Tensor:
        """Return the same with float states."""
        out: Tensor = self.inner(x)
        return out


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

    def forward_float(self, x: Tensor) -> Tensor:
        """Multiply float32 activations with the dequantized weights."""
        return F.linear(x, self.matrix.dequantize(), self.bias)

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


@contextmanager
def float_activations(model: nn.Module) -> Iterator[None]:
    """Make quantized layers multiply float32 activations with dequantized weights, within the block."""
    layer_types = QuantizedLinear | QuantizedConv2d | QuantizedActivation
    layers = [module for module in model.modules() if isinstance(module, layer_types)]
    for layer in layers:
        layer.forward = layer.forward_float  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


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
    supported = "a Linear or an Embedding" if kind.supports_embeddings else "a Linear"
    raise InputError(
        f"scheme {scheme}: {with_article(type(module).__name__)} cannot be quantized; expected {supported}.",
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
    for name, spec in first.scheme.stored_tensors(len(first.codes), first.width, options).items():
        tensors = [m.tensor(name) for m in matrices]
        is_shared = spec.calibrated or not spec.per_row
        if is_shared and not all(t.equal(tensors[0]) for t in tensors):
            return None
        merged = tensors[0] if is_shared else torch.cat(tensors)
        setattr(new.matrix, name, nn.Parameter(merged, requires_grad=False))
    if new.bias is not None:
        zeros = [torch.zeros(m.out_features) if m.bias is None else m.bias.detach() for m in parts]
        new.bias = nn.Parameter(torch.cat(zeros), requires_grad=False)
    return new


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
