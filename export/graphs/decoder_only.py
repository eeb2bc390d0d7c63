"""The graph of a decoder-only language model: one `model.onnx` for prompts and for single tokens.

During an export the forward of attention modules is replaced. For ONNX Runtime on the CPU the packed
projection of queries, keys and values is followed by one GroupQueryAttention, which also applies rotary
positions and appends to the cache; other targets, and heads that the operator does not support, use standard
operators. Head counts come from the modules: after pruning they differ between layers.

File and tensor names are Optimum's: input_ids [B, S], attention_mask [B, P + S], position_ids [B, S],
past_key_values.{i}.key and .value [B, K, P, d]; logits [B, N, V], present.{i}.key and .value. The scalar
num_logits_to_keep, the name in transformers.js, sets the number N of last tokens with logits, or 0 for all S.
A prompt needs only those of one token, and all of them are large: S * V numbers per row. Its default is 0, so
that users that do not set it (Optimum) get all; TensorRT does not support defaults.

Source of GroupQueryAttention: ONNX Runtime's docs/ContribOperators.md.

Shapes: B = batch, S = new tokens, P = past length, T = P + S, H = query heads, K = key-value heads,
d = width of a head, M = positions, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smelt.core.messages import Message, warning
from smelt.export.graphs import standard_operators as operators
from smelt.export.graphs.attention import (
    MASK_VALUE,
    AttentionModule,
    KeyValue,
    attention_modules,
    exportable_norms,
    pack_projections,
    split_heads,
)
from smelt.export.settings import supports_gqa
from smelt.generation.generating_runners import NUM_LOGITS_INPUT
from smelt.models.families.registry import decoder_logits
from smelt.quantization import emit
from smelt.quantization.emit import AttentionHeads
from smelt.runtimes.fixed_caches import WRITE_INDICES


@dataclass(frozen=True)
class SequencePositions:
    """Positions of the tokens, the same for all layers of a graph.

    last_position: int32 [B], T - 1. total_length: int32 scalar, T. bias: float32 [B, 1, S, T], 0 for tokens
    and a large negative number for padding on the left.
    """

    last_position: Tensor
    total_length: Tensor
    bias: Tensor


def group_query_attention(
    packed: tuple[Tensor, Tensor | None, Tensor | None],
    past: tuple[Tensor, Tensor],
    positions: SequencePositions,
    heads: AttentionHeads,
    rotary: tuple[Tensor, Tensor] | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Emit com.microsoft::GroupQueryAttention: causal attention over the past and the input tokens.

    The operator takes S > 1 with P > 0 only for B = 1. It gets no position ids, because with P = 0 it
    ignores them (tested with 1.31): each row then counts from its first position, including padding,
    which is equivalent, since rotary attention depends on distances only.

    Args:
        packed: queries float32 [B, S, H * d], keys and values [B, S, K * d]; or all in one, [B, S,
            (H + 2 K) * d], and None twice.
        past: previous keys (rotated) and values, float32 [B, K, P, d].
        positions: see `SequencePositions`.
        heads: see `AttentionHeads`.
        rotary: cosines and sines, float32 [M, r / 2], of the first r channels of a head; None: positions are
            not rotated in.
        window: how many of the last tokens, including itself, a token attends to; None for all.

    Returns:
        The output [B, S, H * d], and keys and values [B, K, T, d].
    """
    batch, length = packed[0].shape[:2]
    total = positions.bias.shape[3]
    inputs = [*packed, *past, positions.last_position, positions.total_length]
    inputs += [*rotary, None] if rotary is not None else [None, None, None]
    present = (batch, heads.kv_heads, total, heads.head_dim)
    kind = packed[0].dtype
    out, keys, values = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [*inputs, positions.bias],
        {
            "num_heads": heads.query_heads,
            "kv_num_heads": heads.kv_heads,
            "scale": heads.scale,
            "do_rotary": int(rotary is not None),
            **({} if window is None else {"local_window_size": window}),
        },
        dtypes=(kind, kind, kind),
        shapes=((batch, length, heads.query_heads * heads.head_dim), present, present),
        version=1,
    )
    return out, keys, values


@dataclass
class CausalScope:
    """State shared by the modules of one graph while it is traced.

    positions: int64 [B, S]. past: per layer [B, K, P, d] twice. sequence_positions: for GroupQueryAttention.
    bias: float32 [B, 1, S, T], for standard operators, with future tokens masked too; for ONNX's Attention
    Boolean, whether a key is visible. distance: int64 [S, T], from a query back to a key; [B, 1, S, T] with
    write_indices. write_indices: int64 [B], where new keys and values are written into caches of a fixed
    length, P = T; None: they are appended. present: the new caches, per layer.
    """

    positions: Tensor
    past: list[KeyValue]
    sequence_positions: SequencePositions | None
    bias: Tensor
    distance: Tensor
    write_indices: Tensor | None = None
    present: dict[int, KeyValue] = field(default_factory=dict)


def unfused_heads_warning(attentions: Sequence[AttentionModule], target: str) -> Message | None:
    """Return a warning of heads that the fused attention of `target` does not support, or None."""
    if target != "ort-cpu":
        return None
    widths = {
        attention.heads.head_dim
        for attention in attentions
        if not supports_gqa(attention.heads.head_dim, attention.rotary_dim)
    }
    if not widths:
        return None
    return warning(
        "attention-not-fused",
        f"Attention is exported as standard operators, which are slower, because head sizes"
        f" {' and '.join(map(str, sorted(widths)))} are not supported by ONNX Runtime's GroupQueryAttention"
        " (multiples of 8, or of 16 with rotary embeddings).",
    )


def make_causal_scope(
    mask: Tensor, positions: Tensor, past: list[KeyValue], write_indices: Tensor | None = None
) -> CausalScope:
    """Return the scope for int64 mask [B, T] and positions [B, S]."""
    batch, length = positions.shape
    total = mask.shape[1]
    kind = past[0][0].dtype
    if emit.emits_fused_operators():
        return _fused_causal_scope(mask, positions, past, write_indices)
    hidden = ((1 - mask) * int(MASK_VALUE)).to(kind)[:, None, None, :]
    last = torch.ones_like(mask).sum(dim=1).to(torch.int32) - 1
    sequence_positions = SequencePositions(last, last.amax(dim=0) + 1, hidden.expand(batch, 1, length, total))
    keys = torch.arange(total, device=mask.device)
    queries = torch.arange(length, device=mask.device) + past[0][0].shape[2]
    future = (keys[None, :] > queries[:, None]).to(kind) * MASK_VALUE
    bias = _clamp_bias(hidden + future)
    return CausalScope(positions, past, sequence_positions, bias, queries[:, None] - keys[None, :])


def _fused_causal_scope(
    mask: Tensor, positions: Tensor, past: list[KeyValue], write_indices: Tensor | None
) -> CausalScope:
    """Return the scope with a Boolean mask, from which a bias needs one node."""
    keys = torch.arange(mask.shape[1], device=mask.device)
    if write_indices is None:
        queries = keys[-positions.shape[1] :, None]
    else:
        queries = (write_indices[:, None] + torch.arange(positions.shape[1]))[:, None, :, None]
    distance = queries - keys[None, :]
    visible = (mask > 0)[:, None, None, :] & (distance >= 0)
    return CausalScope(positions, past, None, visible, distance, write_indices)


def _clamp_bias(bias: Tensor) -> Tensor:
    """Clamp values that are masked for several reasons to the range of fp16."""
    return torch.maximum(bias, bias.new_full((), 2 * MASK_VALUE))


class RotaryTables(nn.Module):
    """Cosines and sines of all positions, float32 [M, r / 2] twice, of r channels of a head.

    They are exact, even if positions are fp16.
    """

    def __init__(self, rotary: Any, limit: int, layer_type: str | None = None) -> None:
        super().__init__()
        position_range = torch.arange(limit)[None]
        options = {} if layer_type is None else {"layer_type": layer_type}
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32), position_ids=position_range, **options)
        half = cos.shape[-1] // 2
        self.cos = nn.Buffer(cos[0, :, :half].contiguous())
        self.sin = nn.Buffer(sin[0, :, :half].contiguous())


def prepare_causal_attention(model: Any, attentions: Sequence[AttentionModule]) -> None:
    """Add the packed projection to each attention, and the position table to the model, before tracing."""
    body = model.base_model
    rotary_types = sorted(
        {_rotary_type(model.config, a.module.layer_idx) for a in attentions if a.rotary_dim}, key=str
    )
    if rotary_types and not hasattr(body, "tables"):
        limit = int(model.config.max_position_embeddings)
        body.tables = nn.ModuleDict(
            {kind or "all": RotaryTables(body.rotary_emb, limit, kind) for kind in rotary_types}
        )
    pack_projections(attentions)


def _rotary_type(config: Any, layer_index: int) -> str | None:
    """Return which of several rotary positions a layer has, as in transformers' `layer_types`; None: one."""
    kinds, rope = getattr(config, "layer_types", None), getattr(config, "rope_parameters", None) or {}
    return str(kinds[layer_index]) if kinds and kinds[layer_index] in rope else None


@contextmanager
def exportable_causal_model(
    model: Any, attentions: Sequence[AttentionModule], scope: CausalScope
) -> Iterator[None]:
    """Replace attention, norms and activations of `model` for the export, within the block."""
    body = model.base_model
    replacements: list[tuple[nn.Module, Callable[..., Any]]] = []
    for attention in attentions:
        rotary: KeyValue | None = None
        if attention.rotary_dim:
            tables = body.tables[_rotary_type(model.config, attention.module.layer_idx) or "all"]
            rotary = (tables.cos, tables.sin)
        replacements.append((attention.module, partial(_attend, attention, scope, rotary)))
    if hasattr(body, "tables"):
        replacements.append(
            (body.rotary_emb, lambda *unused, **also_unused: (scope.positions, scope.positions))
        )
    for module, forward in replacements:
        module.forward = forward
    try:
        with exportable_norms(model, attentions[0].family.rms_norm):
            yield
    finally:
        for module, _ in replacements:
            del module.forward


def _attend(
    attention: AttentionModule, scope: CausalScope, rotary: KeyValue | None, hidden_states: Tensor,
    *unused: Any, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Replace the forward of an attention module; masks and caches come from `scope`."""
    heads, layer_index = attention.heads, attention.module.layer_idx
    past = scope.past[layer_index]
    sequence_positions = scope.sequence_positions if emit.export_target() == "ort-cpu" else None
    if sequence_positions is not None and supports_gqa(heads.head_dim, attention.rotary_dim):
        packed = _project_qkv(attention, hidden_states)
        out, *present = group_query_attention(
            packed, past, sequence_positions, heads, rotary, attention.window
        )
    else:
        query, key, value = _normalize_qk(attention, attention.project_qkv(hidden_states))
        attend: Callable[..., tuple[Tensor, Tensor, Tensor]] = _standard_attention
        if emit.emits_fused_operators():
            attend = partial(_fused_attention, write_indices=scope.write_indices)
        out, *present = attend(
            query,
            key,
            value,
            past,
            _attention_bias(attention, scope),
            heads=heads,
            rotary=rotary,
            positions=scope.positions,
        )
    scope.present[layer_index] = (present[0], present[1])
    return attention.projection(attention.parts.out)(out), None


def _project_qkv(attention: AttentionModule, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return queries, keys and values as one tensor if one layer computes them, else as three."""
    if attention.parts.qk_norms is None:
        if attention.parts.packed in ("equal", "grouped"):
            return attention.projection(attention.parts.query)(x), None, None
        if not attention.parts.packed and attention.module.pack.is_whole:
            return attention.module.pack.packed_output(x), None, None
    query, key, value = _normalize_qk(attention, attention.project_qkv(x))
    return query, key, value


def _normalize_qk(attention: AttentionModule, three: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Normalize queries and keys per head, in families that do."""
    if attention.parts.qk_norms is None:
        return three
    width = attention.heads.head_dim
    normed = [
        attention.projection(name)(x.unflatten(2, (-1, width))).flatten(2)
        for name, x in zip(attention.parts.qk_norms, three[:2], strict=True)
    ]
    return (*normed, three[2])


def _attention_bias(attention: AttentionModule, scope: CausalScope) -> Tensor:
    """Return the bias of the scores, with tokens outside of the window masked too."""
    if emit.emits_fused_operators():
        visible = scope.bias if attention.window is None else scope.bias & (scope.distance < attention.window)
        zero = torch.zeros((), dtype=scope.past[0][0].dtype)
        return torch.where(visible, zero, torch.full_like(zero, MASK_VALUE))
    if attention.window is None:
        return scope.bias
    return _clamp_bias(scope.bias + (scope.distance >= attention.window).to(scope.bias.dtype) * MASK_VALUE)


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, past: KeyValue, bias: Tensor,
    *, heads: AttentionHeads, rotary: KeyValue | None, positions: Tensor, write_indices: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if rotary is not None:
        query = operators.rotary_embedding(query, *rotary, positions, heads.query_heads)
        key = operators.rotary_embedding(key, *rotary, positions, heads.kv_heads)
    if write_indices is None and emit.appends_in_attention():
        out, keys, values = operators.standard_attention(query, key, value, bias, past, heads)
        return out, keys, values
    new_keys, new_values = split_heads(key, heads.kv_heads), split_heads(value, heads.kv_heads)
    if write_indices is None:
        keys, values = torch.cat([past[0], new_keys], dim=2), torch.cat([past[1], new_values], dim=2)
    else:
        keys = operators.tensor_scatter(past[0], new_keys, write_indices)
        values = operators.tensor_scatter(past[1], new_values, write_indices)
    by_head = split_heads(query, heads.query_heads)
    [out] = operators.standard_attention(by_head, keys, values, bias, None, heads)
    return out.transpose(1, 2).flatten(2), keys, values


def _standard_attention(
    query: Tensor, key: Tensor, value: Tensor, past: KeyValue, bias: Tensor,
    *, heads: AttentionHeads, rotary: KeyValue | None, positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = (
        split_heads(query, heads.query_heads),
        split_heads(key, heads.kv_heads),
        split_heads(value, heads.kv_heads),
    )
    if rotary is not None:
        cos, sin = (table[positions][:, None] for table in rotary)
        q, k = _apply_rotary(q, cos, sin), _apply_rotary(k, cos, sin)
    keys, values = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
    q = q * heads.scale
    if heads.query_heads == heads.kv_heads:
        out = torch.softmax(q @ keys.transpose(2, 3) + bias, dim=-1) @ values
    else:
        # [B, K, H / K, S, d]: each key is shared by its queries without being repeated
        q = q.unflatten(1, (heads.kv_heads, heads.query_heads // heads.kv_heads))
        scores = q @ keys.transpose(2, 3)[:, :, None] + bias[:, :, None]
        out = (torch.softmax(scores, dim=-1) @ values[:, :, None]).flatten(1, 2)
    return out.transpose(1, 2).flatten(2), keys, values


def _apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate r channels of [B, H, S, d]; cosines and sines are [B, 1, S, r / 2] (arXiv:2104.09864)."""
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        rotated, rest = x.split([width, x.shape[-1] - width], dim=-1)
        return torch.cat([_apply_rotary(rotated, cos, sin), rest], dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DecoderOnlyStep(nn.Module):
    """Tokens and caches -> logits float32 [B, N, V], the caches S longer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.attentions = model, attention_modules(model)
        prepare_causal_attention(model, self.attentions)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past: list[Tensor],
        keep: Tensor,
        write_indices: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return logits, then key and value [B, K, P + S, d] of each layer; `keep` is an int64 scalar.

        With `write_indices` the caches have a fixed length, [B, K, C, d], as inputs and as outputs.
        """
        pairs = list(zip(past[::2], past[1::2], strict=True))
        scope = make_causal_scope(attention_mask, position_ids, pairs, write_indices)
        with exportable_causal_model(self.model, self.attentions, scope):
            hidden = self.model.base_model(
                input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=_CacheLength(past[0].shape[2]),
                use_cache=True,
            ).last_hidden_state
        batch, length = input_ids.shape
        num_kept = torch.where(keep == 0, length, keep).item()
        torch._check(num_kept >= 1)
        torch._check(num_kept <= length)
        hidden = hidden.narrow(1, length - num_kept, num_kept)
        # 2-D, so that the layer uses the embedding's own matrix if both are tied
        logits = decoder_logits(self.model, hidden.flatten(0, 1))
        caches = [t for i in range(len(scope.present)) for t in scope.present[i]]
        return logits.float().reshape(batch, num_kept, logits.shape[-1]), *caches


class _CacheLength:
    """The part of a transformers cache that a decoder uses: its length."""

    is_compileable = False

    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def decoder_only_graph(
    model: Any, cache_length: int | None = None
) -> tuple[nn.Module, tuple[Any, ...], list[str], list[str], tuple[Any, ...]]:
    """Return module, example inputs, names of inputs and outputs, and dynamic axes of the one graph.

    cache_length: of caches with a fixed length; None: they grow.
    """
    step = DecoderOnlyStep(model)
    kind = model.get_input_embeddings()
    dtype = next((p.dtype for p in kind.parameters() if p.is_floating_point()), torch.float32)
    batch, length, past_length = 2, 3, 5
    ids = torch.ones(batch, length, dtype=torch.int64)
    total = past_length + length if cache_length is None else cache_length
    mask = torch.ones(batch, total, dtype=torch.int64)
    positions = torch.arange(past_length, past_length + length).expand(batch, length).contiguous()
    heads = [attention.heads for attention in step.attentions]
    cached = past_length if cache_length is None else cache_length
    past = [torch.zeros(batch, h.kv_heads, cached, h.head_dim, dtype=dtype) for h in heads for _ in "kv"]
    names = [f"{i}.{part}" for i in range(len(heads)) for part in ("key", "value")]
    grows = cache_length is None
    axes: tuple[Any, ...] = (
        {0: "batch", 1: "sequence_length"},
        {0: "batch", **({1: "total_sequence_length"} if grows else {})},
        {0: "batch", 1: "sequence_length"},
        [{0: "batch", **({2: "past_sequence_length"} if grows else {})} for _ in past],
        None,
    )
    inputs = ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{n}" for n in names)]
    inputs.append(NUM_LOGITS_INPUT)
    examples: tuple[Any, ...] = (ids, mask, positions, past, torch.tensor(0))
    if not grows:
        inputs.append(WRITE_INDICES)
        axes, examples = (*axes, {0: "batch"}), (*examples, torch.full((batch,), past_length))
    return step, examples, inputs, ["logits", *(f"present.{n}" for n in names)], axes
