"""Attention, norms and activations as the exported graph computes them; modules' forwards are replaced.

The forward of attention modules is replaced while a graph is traced. Queries, keys and values of the same
input are computed by one packed projection. Attention itself is one fused operator
(com.microsoft::MultiHeadAttention) for ONNX Runtime on the CPU, or standard operators elsewhere.
transformers' AttentionInterface is called only after the three projections and their transposes, which is too
late for both. The family defines the names of a module's parts. Head counts come from the modules: after
pruning they differ between layers.

`GraphSpec` is one graph of a model, before it is traced.

Shapes: B = batch, S = queries (input tokens), P = past length, T = keys (P + S where tokens are cached),
H = query heads, K = key-value heads, d = width of a head, D = width of the model, M = positions in the rotary
table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.core.errors import InputError
from smelt.export.graphs import standard_operators as operators
from smelt.export.graphs.distances import (
    DistanceEmbeddings,
    distance_embeddings,
    projected_bias,
    relative_bias,
)
from smelt.models.families.family import Family, RmsNormForm
from smelt.models.families.layout import Attention
from smelt.models.families.registry import blocks_of, family_of
from smelt.models.layers import LowRankLinear, ScaledLinear
from smelt.quantization import emit
from smelt.quantization.emit import AttentionHeads
from smelt.quantization.layers import concat_quantized, float_activations

KeyValue = tuple[Tensor, Tensor]
MASK_VALUE = -10000.0  # masks everything after softmax and, unlike the smallest float, is finite in fp16


@dataclass
class AttentionScope:
    """State shared by the attention modules of one graph while it is traced.

    mask: int64 [B, T], 1 at tokens of the source.
    past, cross: per decoder layer the cached keys and values [B, H, P or T, d]; None outside a decoder.
    present: the new caches of self-attention, per decoder layer.
    """

    mask: Tensor | None = None
    past: list[KeyValue] | None = None
    cross: list[KeyValue] | None = None
    present: dict[int, KeyValue] = field(default_factory=dict)


class PackedLinear(nn.Module):
    """Several linear layers of one input as one layer if they are of one kind, otherwise one by one.

    For low-rank layers only the half that reads the input is packed; the other half is a separate layer after
    it.

    sizes: outputs of the layers. factors: common factors of the input, if there are any. firsts: the layers
    that read it. packed: these as one, None if they are not of one kind. is_whole: whether that one layer
    computes all outputs.
    """

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self.sizes = [_out_features(m) for m in linears]
        self.parts = nn.ModuleList(linears)
        self.firsts = [m.down if isinstance(m, LowRankLinear) else m for m in linears]
        is_direct = self.firsts == list(linears)
        self.factors, self.firsts = _shared_factors(self.firsts)
        self._widths = [_out_features(m) for m in self.firsts]
        self.packed = _pack_linears(self.firsts)
        self.is_whole = self.packed is not None and is_direct

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map [..., K] to one [..., N] for each layer."""
        if self.packed is None:
            return tuple(m(x) for m in self.parts)
        outputs = torch.split(self.packed_output(x), self._widths, dim=-1)
        return tuple(
            m.up(y) if isinstance(m, LowRankLinear) else y for m, y in zip(self.parts, outputs, strict=True)
        )

    def packed_output(self, x: Tensor) -> Tensor:
        """Return the outputs of the packed layer, concatenated."""
        assert self.packed is not None
        out: Tensor = self.packed(x if self.factors is None else x * self.factors)
        return out


def _shared_factors(firsts: list[nn.Module]) -> tuple[nn.Parameter | None, list[nn.Module]]:
    """Return the common input factors of all of `firsts`, and the layers after them."""
    scaled = [m for m in firsts if isinstance(m, ScaledLinear)]
    if not scaled or len(scaled) < len(firsts):
        return None, firsts
    factors = scaled[0].factors
    if not all(m.factors.equal(factors) for m in scaled):
        return None, firsts
    return factors, [m.linear for m in scaled]


def _out_features(module: nn.Module) -> int:
    size = module.out_features
    assert isinstance(size, int)
    return size


def _pack_linears(linears: Sequence[nn.Module]) -> nn.Module | None:
    if all(type(m) is nn.Linear for m in linears):
        return _concat_linears([m for m in linears if isinstance(m, nn.Linear)])
    return concat_quantized(linears)


def _concat_linears(linears: list[nn.Linear]) -> nn.Linear:
    bias = any(m.bias is not None for m in linears)
    weight = torch.cat([m.weight.detach() for m in linears])
    new = nn.Linear(weight.shape[1], weight.shape[0], bias, device="meta")
    new.weight = nn.Parameter(weight, requires_grad=False)
    if bias:
        new.bias = nn.Parameter(_concat_biases(linears, weight), requires_grad=False)
    return new


def _concat_biases(linears: Sequence[nn.Linear], like: Tensor) -> Tensor:
    return torch.cat([like.new_zeros(m.out_features) if m.bias is None else m.bias.detach() for m in linears])


def full_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    heads: int,
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend over given keys and values; see `emit.multi_head_attention` for shapes."""
    if emit.export_target() == "ort-cpu":
        mask = None if mask is None else mask.to(torch.int32)
        return emit.multi_head_attention(query, key, value, mask, heads, scale, bias)
    if emit.emits_fused_operators():
        return _fused_attention(query, key, value, mask, heads, scale, bias)
    key, value = (t if t.dim() == 4 else split_heads(t, heads) for t in (key, value))
    return _standard_attention(query, key, value, mask, heads, scale, bias)


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    heads: int,
    scale: float,
    bias: Tensor | None,
) -> Tensor:
    """Emit ONNX's Attention for keys and values of a cache, [B, H, T, d], or of projections."""
    batch, length, width = query.shape
    if mask is not None:
        hidden = operators.mask_bias(mask, MASK_VALUE, query.dtype)
        if bias is None and length > 1:
            # what padding attends to does not matter; a sum is cheaper than an expansion
            bias = hidden[:, None, :, None]
        keys = hidden[:, None, None, :]
        bias = keys if bias is None else keys + bias
    sizes = AttentionHeads(heads, heads, width // heads, scale)
    if key.dim() == 3:
        return operators.standard_attention(query, key, value, bias, None, sizes)[0]
    # of a single token heads need no transposition
    by_head = query.reshape(batch, heads, 1, -1) if length == 1 else split_heads(query, heads)
    [out] = operators.standard_attention(by_head, key, value, bias, None, sizes)
    return out.reshape(batch, 1, width) if length == 1 else out.transpose(1, 2).flatten(2)


def cached_step_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: KeyValue,
    heads: int,
    scale: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend over the past and the present token; see `emit.cached_attention` for shapes."""
    if emit.export_target() == "ort-cpu":
        return emit.cached_attention(query, key, value, past, heads, scale, bias)
    if emit.appends_in_attention():
        sizes = AttentionHeads(heads, heads, query.shape[2] // heads, scale)
        out, new_keys, new_values = operators.standard_attention(query, key, value, bias, past, sizes)
        return out, new_keys, new_values
    keys = torch.cat([past[0], split_heads(key, heads)], dim=2)
    values = torch.cat([past[1], split_heads(value, heads)], dim=2)
    if emit.emits_fused_operators():
        return _fused_attention(query, keys, values, None, heads, scale, bias), keys, values
    return _standard_attention(query, keys, values, None, heads, scale, bias), keys, values


def _standard_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    heads: int,
    scale: float,
    bias: Tensor | None,
) -> Tensor:
    scores = (split_heads(query, heads) * scale) @ key.transpose(2, 3)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if mask is not None:
        scores = scores + ((1 - mask) * int(MASK_VALUE))[:, None, None, :].to(scores.dtype)
    out = torch.softmax(scores, dim=-1) @ value
    return out.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Turn [B, S, H * d] into [B, H, S, d]."""
    heads_first: Tensor = x.unflatten(2, (heads, x.shape[2] // heads)).transpose(1, 2)
    return heads_first


@dataclass(frozen=True)
class AttentionModule:
    """An attention module of a model.

    parts: the names that its parts have in the model. window: see `Family.window`. distances: of a
    "projected" bias. causal: whether no token of an encoder attends to a later one.
    """

    module: Any
    parts: Attention
    family: Family
    window: int | None = None
    distances: DistanceEmbeddings | None = None
    causal: bool = False

    def projection(self, name: str) -> Any:
        """Return the projection `name` of the model; None if the module itself does not compute it."""
        module_prefix = f"{self.parts.name}."
        return (
            self.module.get_submodule(name.removeprefix(module_prefix))
            if name.startswith(module_prefix)
            else None
        )

    @property
    def heads(self) -> AttentionHeads:
        """The current heads of the module."""
        parts, width = self.parts, int(getattr(self.module, self.parts.head_dim_attribute))
        terms = 3 if parts.relative_bias == "projected" else 1
        scale = (terms * width) ** -0.5 if parts.scale_attribute == "width" else 1.0
        if parts.scale_attribute not in (None, "width"):
            scale = float(getattr(self.module, str(parts.scale_attribute)))
        if parts.heads_attribute is not None:
            queries = keys = int(getattr(self.module, parts.heads_attribute))
        else:
            queries, keys = (int(self.projection(n).out_features) // width for n in (parts.query, parts.key))
        if parts.packed in ("equal", "per_head") and parts.heads_attribute is None:
            queries = keys = keys // 3
        elif parts.packed == "grouped":
            keys = int(getattr(self.module, str(parts.kv_heads_attribute)))
            queries -= 2 * keys
        return AttentionHeads(queries, keys, width, scale)

    @property
    def rotary_dim(self) -> int:
        """How many channels of a head are rotated by their positions, the first ones."""
        attribute = self.parts.rotary_attribute
        if not self.parts.rotary or not (attribute is None or getattr(self.module, attribute)):
            return 0
        return int(self.heads.head_dim * self.family.rotary_fraction(self.module.config.to_dict()))

    def project_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of [B, S, D], each [B, S, its heads * d]."""
        heads = self.heads
        if not self.parts.packed:
            projections: tuple[Tensor, ...] = self.module.pack(x)
        elif self.parts.packed == "per_head":
            # one Gather each: onnx infers a width of 0 for Attention after a Reshape to [B, S, H, 3, d]
            by_head = range(0, heads.query_heads * 3, 3)
            packed = self.projection(self.parts.query)(x)
            projections = tuple(
                packed.index_select(2, _rows_of_heads([head + part for head in by_head], heads.head_dim))
                for part in range(3)
            )
        else:
            sizes = [
                heads.query_heads * heads.head_dim,
                heads.kv_heads * heads.head_dim,
                heads.kv_heads * heads.head_dim,
            ]
            projections = torch.split(self.projection(self.parts.query)(x), sizes, dim=-1)
        return projections


def attention_modules(
    model: Any, stack: str | None = None, cross: bool | None = None
) -> list[AttentionModule]:
    """Return the attention modules of `model` in order.

    Args:
        model: a model of a supported family.
        stack: only those of this stack, as named in settings.
        cross: only cross-attention, or only self-attention.

    Raises:
        InputError: another family.
    """
    family = family_of(model)
    if family is None:
        raise InputError(
            f"{type(model).__name__}: the onnx stage cannot export its attention modules.",
            code="unsupported-family",
        )
    distances = distance_embeddings(model, family)
    return [
        AttentionModule(
            model.get_submodule(parts.name),
            parts,
            family,
            block.window,
            distances,
            block.stack.causal and family.architecture == "encoder",
        )
        for block in blocks_of(model)
        if stack in (None, block.stack.name)
        for parts in block.attentions
        if cross in (None, parts.cross)
    ]


def pack_projections(attentions: Sequence[AttentionModule]) -> None:
    """Add packed projections of queries, keys and values, and their biases, to attention modules, once.

    Modules that share their projections share the packed one.
    """
    packs: dict[tuple[nn.Module, ...], PackedLinear] = {}
    for attention in attentions:
        module, parts = attention.module, attention.parts
        if parts.relative_bias and attention.family.relative_bias and not hasattr(module, "bias_by_distance"):
            by_distance = attention.family.relative_bias().bias_by_distance(module)
            if by_distance is not None:
                module.bias_by_distance = nn.Buffer(by_distance[0], persistent=False)
        if attention.distances is not None and not hasattr(module, "distance_keys"):
            # constants, which runtimes would compute at each call from quantized layers
            with torch.no_grad(), float_activations(module):
                for name, layer in (("distance_queries", parts.query), ("distance_keys", parts.key)):
                    value = attention.projection(layer)(attention.distances.values[None])
                    setattr(module, name, nn.Buffer(value, persistent=False))
        if not hasattr(module, "pack") and not parts.packed:
            projections = tuple(attention.projection(name) for name in (parts.query, parts.key, parts.value))
            if projections not in packs:
                packs[projections] = PackedLinear(projections)
            module.pack = packs[projections]


@contextmanager
def exportable_attention(modules: Sequence[AttentionModule], scope: AttentionScope) -> Iterator[None]:
    """Replace the forward of these attention modules for the export, within the block."""
    pack_projections(modules)
    for attention in modules:
        attention.module.forward = partial(_replaced_forward, attention, scope)
    try:
        yield
    finally:
        for attention in modules:
            del attention.module.forward


def _replaced_forward(
    attention: AttentionModule, scope: AttentionScope, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor | None, ...]:
    """Compute an attention module, with its `residual_norm`, in its own form of arguments and results."""
    forward = _FORWARDS[attention.parts.relative_bias]
    output, *other_outputs = forward(attention, scope, hidden_states, *args, **kwargs)
    if attention.parts.residual_norm is not None:
        output = attention.projection(attention.parts.residual_norm)(hidden_states + output)
    return output, *other_outputs


def _attend(
    attention: AttentionModule, scope: AttentionScope, hidden_states: Tensor,
    *unused: Any, key_value_states: Tensor | None = None, **also_unused: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Replace the forward of an attention module; masks and caches come from `scope`."""
    if key_value_states is not None:
        return _cross_attention(attention, scope, hidden_states), None
    query, key, value = attention.project_qkv(hidden_states)
    if attention.rotary_dim:
        cos, sin = also_unused["position_embeddings"]
        query, key = (_apply_rotary(x, attention.heads.head_dim, cos, sin) for x in (query, key))
    limited = attention.window is not None or attention.causal
    bias = _position_bias(attention, query) if limited else None
    return _self_attention(attention, scope, (query, key, value), bias), None


def _attend_with_bias(
    attention: AttentionModule, scope: AttentionScope, hidden_states: Tensor,
    attention_mask: Tensor | None = None, position_bias: Tensor | None = None, **unused: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Replace the forward of an attention module whose bias is an input, float32 [B, H, S, T]."""
    return _self_attention(attention, scope, attention.project_qkv(hidden_states), position_bias), None


def _attend_by_distance(
    attention: AttentionModule, scope: AttentionScope, hidden_states: Tensor,
    *unused: Any, key_value_states: Tensor | None = None, position_bias: Tensor | None = None,
    **also_unused: Any,
) -> tuple[Tensor, Tensor | None, None]:  # fmt: skip
    """Replace the forward of an attention module that returns its bias."""
    if key_value_states is not None:
        return _cross_attention(attention, scope, hidden_states), None, None
    packed = attention.project_qkv(hidden_states)
    if position_bias is None:
        length = hidden_states.shape[1]
        past = 0 if scope.past is None else scope.past[attention.module.layer_idx][0].shape[2]
        position_bias = relative_bias(attention.module.bias_by_distance, length, past + length)
    return _self_attention(attention, scope, packed, position_bias), position_bias, None


def _attend_with_projected_bias(
    attention: AttentionModule, scope: AttentionScope, hidden_states: Tensor,
    *unused: Any, **also_unused: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Replace the forward of an attention module that projects embeddings of distances."""
    assert attention.distances is not None
    query, key, value = attention.project_qkv(hidden_states)
    heads, module = attention.heads, attention.module
    by_head = [
        split_heads(x, heads.query_heads) for x in (query, key, module.distance_queries, module.distance_keys)
    ]
    bias = projected_bias(by_head[0], by_head[1], by_head[2], by_head[3], attention.distances.rows)
    return _self_attention(attention, scope, (query, key, value), bias * heads.scale), None


def _cross_attention(attention: AttentionModule, scope: AttentionScope, hidden_states: Tensor) -> Tensor:
    assert scope.cross is not None
    key, value = scope.cross[attention.module.layer_idx]
    query, heads = attention.projection(attention.parts.query)(hidden_states), attention.heads
    return _output_projection(
        attention, full_attention(query, key, value, scope.mask, heads.query_heads, heads.scale)
    )


def _self_attention(
    attention: AttentionModule, scope: AttentionScope, packed: tuple[Tensor, ...], bias: Tensor | None
) -> Tensor:
    query, key, value = packed
    heads = attention.heads
    if scope.past is None:
        return _output_projection(
            attention, full_attention(query, key, value, scope.mask, heads.query_heads, heads.scale, bias)
        )
    layer_index = attention.module.layer_idx
    attention_output, *present = cached_step_attention(
        query, key, value, scope.past[layer_index], heads.query_heads, heads.scale, bias
    )
    scope.present[layer_index] = (present[0], present[1])
    return _output_projection(attention, attention_output)


def _output_projection(attention: AttentionModule, output: Tensor) -> Tensor:
    out = attention.projection(attention.parts.out)
    result: Tensor = output if out is None else out(output)
    return result


_FORWARDS: dict[str | None, Callable[..., Any]] = {
    None: _attend,
    "handed_on": _attend_by_distance,
    "given": _attend_with_bias,
    "projected": _attend_with_projected_bias,
}


def _rows_of_heads(heads: list[int], width: int) -> Tensor:
    """Return the indices of the channels of these heads, int64 [heads * width]."""
    return torch.tensor([head * width + channel for head in heads for channel in range(width)])


def _apply_rotary(x: Tensor, width: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, S, H * d]; cosines and sines are [1, S, d], each twice (arXiv:2104.09864)."""
    heads = x.unflatten(2, (-1, width))
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    out: Tensor = (heads * cos[:, :, None] + rotated * sin[:, :, None]).flatten(2)
    return out


def _position_bias(attention: AttentionModule, query: Tensor) -> Tensor:
    """Return a bias [1, 1, S, S] that masks tokens outside of the window on either side, or later ones."""
    positions = torch.arange(query.shape[1])
    distances = positions[:, None] - positions[None, :]
    is_outside = distances < 0 if attention.window is None else distances.abs() > attention.window
    return (is_outside.to(query.dtype) * MASK_VALUE)[None, None]


@contextmanager
def exportable_norms(model: nn.Module, kind: RmsNormForm) -> Iterator[None]:
    """Replace RMS norms of this kind and tanh-GELUs in `model` for the export."""
    changed_modules = []
    for module in model.modules():
        if hasattr(module, kind.epsilon_attribute) and not isinstance(module, nn.LayerNorm):
            module.forward = partial(rms_norm, module, kind)
            changed_modules.append(module)
        elif type(module).__name__ == "NewGELUActivation":  # expanded there, one operator in ONNX
            module.forward = partial(F.gelu, approximate="tanh")
            changed_modules.append(module)
    try:
        yield
    finally:
        for module in changed_modules:  # a module with several names is traced as several, with one dict
            vars(module).pop("forward", None)


def rms_norm(module: Any, kind: RmsNormForm, x: Tensor) -> Tensor:
    """Compute an RMS norm (Zhang & Sennrich 2019, arXiv:1910.07467).

    Runtimes fuse x / sqrt(mean(x^2) + eps) * w into one operator. It remains float32 in fp16 graphs, because
    x^2 overflows in fp16 from 256 on (`export/convert_to_half.py`).
    """
    weight, epsilon = module.weight, getattr(module, kind.epsilon_attribute)
    weight = 1 + weight if kind.adds_one_to_weight else weight
    if emit.emits_fused_operators():
        return operators.rms_normalization(x, weight, epsilon)
    normal: Tensor = (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)) * weight
    return normal


@dataclass(frozen=True)
class GraphSpec:
    """One graph to export: the module, its example inputs, and the names of inputs and outputs.

    module: has `attentions`, its `AttentionModule`s. dynamic_axes: for each input the names of its dynamic
    dimensions, by index. input_defaults: optional inputs, with their default values.
    """

    name: str
    module: Any
    inputs: tuple[Any, ...]
    input_names: list[str]
    output_names: list[str]
    dynamic_axes: tuple[Any, ...]
    input_defaults: Mapping[str, int] = field(default_factory=dict)
