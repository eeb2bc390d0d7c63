"""The graph of a decoder-only language model: one `model.onnx` for prompts and for single tokens.

File and tensor names are Optimum's: input_ids [B, S], attention_mask [B, P + S], position_ids [B, S],
past_key_values.{i}.key and .value [B, K, P, d]; logits [B, N, V], present.{i}.key and .value. The scalar
num_logits_to_keep, the name in transformers.js, sets the number N of last tokens with logits, or 0 for all S.
A prompt needs only those of one token, and all of them are large: S * V numbers per row. Its default is 0, so
that users that do not set it (Optimum) get all; TensorRT does not support defaults.

Shapes: B = batch, S = new tokens, P = past length, K = key-value heads, d = width of a head,
V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from smelt.export.graphs.attention_modules import attention_modules
from smelt.export.graphs.causal_attention import (
    exportable_causal_model,
    make_causal_scope,
    prepare_causal_attention,
)
from smelt.runtime.causal import NUM_LOGITS_INPUT


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
    ) -> tuple[Tensor, ...]:
        """Return logits, then key and value [B, K, P + S, d] of each layer; `keep` is an int64 scalar."""
        pairs = list(zip(past[::2], past[1::2], strict=True))
        scope = make_causal_scope(attention_mask, position_ids, pairs)
        with exportable_causal_model(self.model, self.attentions, scope):
            hidden = self.model.base_model(
                input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=_CacheLength(past[0].shape[2]),
                use_cache=True,
            ).last_hidden_state
        batch, length = input_ids.shape
        kept = torch.where(keep == 0, length, keep).item()
        torch._check(kept >= 1)
        torch._check(kept <= length)
        hidden = hidden.narrow(1, length - kept, kept)
        # 2-D, so that the layer uses the embedding's own matrix if both are tied
        logits = self.model.get_output_embeddings()(hidden.flatten(0, 1))
        caches = [t for i in range(len(scope.present)) for t in scope.present[i]]
        return logits.float().reshape(batch, kept, logits.shape[-1]), *caches


class _CacheLength:
    """The part of a transformers cache that a decoder uses: its length."""

    is_compileable = False

    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def decoder_only_graph(
    model: Any,
) -> tuple[nn.Module, tuple[Any, ...], list[str], list[str], tuple[Any, ...]]:
    """Return module, example inputs, names of inputs and outputs, and dynamic axes of the one graph."""
    step = DecoderOnlyStep(model)
    kind = model.get_input_embeddings()
    dtype = next((p.dtype for p in kind.parameters() if p.is_floating_point()), torch.float32)
    batch, length, before = 2, 3, 5
    ids = torch.ones(batch, length, dtype=torch.int64)
    mask = torch.ones(batch, before + length, dtype=torch.int64)
    places = torch.arange(before, before + length).expand(batch, length).contiguous()
    heads = [one.heads for one in step.attentions]
    past = [torch.zeros(batch, h.kv_heads, before, h.head_dim, dtype=dtype) for h in heads for _ in "kv"]
    names = [f"{i}.{part}" for i in range(len(heads)) for part in ("key", "value")]
    axes = (
        {0: "batch", 1: "sequence_length"},
        {0: "batch", 1: "total_sequence_length"},
        {0: "batch", 1: "sequence_length"},
        [{0: "batch", 2: "past_sequence_length"} for _ in past],
        None,
    )
    inputs = ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{n}" for n in names)]
    inputs.append(NUM_LOGITS_INPUT)
    return (
        step,
        (ids, mask, places, past, torch.tensor(0)),
        inputs,
        ["logits", *(f"present.{n}" for n in names)],
        axes,
    )
