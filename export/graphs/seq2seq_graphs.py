"""The graphs of an encoder and a decoder.

`encoder_model` also computes the keys and values of cross-attention (once per text, not at each step);
`decoder_with_past_model` decodes one token.

Shapes: B = batch, L = source length, P = past length, H = heads, d = width of a head, D = width of the
model, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from smelt.export.graphs.attention import (
    AttentionModule,
    AttentionScope,
    PackedLinear,
    attention_modules,
    exportable_attention,
    exportable_norms,
    split_heads,
)
from smelt.export.graphs.graph_spec import GraphSpec
from smelt.quantization.layers import QuantizedLinear


class Seq2SeqEncoder(nn.Module):
    """input_ids, attention_mask [B, L] -> last_hidden_state [B, L, D], keys and values [B, H, L, d]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder, self.scope = model.get_encoder(), AttentionScope()
        self.attentions = attention_modules(model, "encoder_layers")
        self.rms_norm = self.attentions[0].family.rms_norm
        crosses = attention_modules(model, "decoder_layers", cross=True)
        self.heads = [attention.heads.kv_heads for attention in crosses]
        both = [
            attention.projection(n)
            for attention in crosses
            for n in (attention.parts.key, attention.parts.value)
        ]
        once = list(dict.fromkeys(both))  # decoder layers may share them
        self.pack, self.places = PackedLinear(once), [once.index(product) for product in both]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the hidden states and each decoder layer's cross-attention keys and values."""
        self.scope.mask = attention_mask
        with exportable_attention(self.attentions, self.scope), exportable_norms(self.encoder, self.rms_norm):
            hidden = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        heads = [h for h in self.heads for _ in "kv"]
        packed = self.pack(hidden)
        caches = [split_heads(packed[at], h).contiguous() for at, h in zip(self.places, heads, strict=True)]
        return hidden, *caches


class Seq2SeqDecoderStep(nn.Module):
    """One token and the caches -> logits float32 [B, V], the self-attention caches one longer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.head, self.scope = (
            model.get_decoder(),
            model.get_output_embeddings(),
            AttentionScope(),
        )
        self.attentions = attention_modules(model, "decoder_layers")
        family = self.attentions[0].family
        self.rms_norm, self.scale = family.rms_norm, family.output_scale(model.config.to_dict())
        bias = model.get_buffer(family.logits_bias) if family.logits_bias else None
        if bias is not None and bool(bias.any()):
            self.head = _with_bias(self.head, bias.flatten())

    def forward(
        self, input_ids: Tensor, encoder_attention_mask: Tensor, past: list[Tensor], cross: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return logits, then key and value [B, H, P + 1, d] of each layer."""
        self.scope.mask = encoder_attention_mask
        self.scope.past = list(zip(past[::2], past[1::2], strict=True))
        self.scope.cross = list(zip(cross[::2], cross[1::2], strict=True))
        self.scope.present = {}
        with exportable_attention(self.attentions, self.scope), exportable_norms(self.decoder, self.rms_norm):
            hidden = self.decoder(
                input_ids,
                # only enables cross-attention; its keys and values are in the caches
                encoder_hidden_states=past[0],
                past_key_values=_CacheLength(past[0].shape[2]),
                use_cache=True,
            ).last_hidden_state
        hidden = hidden if self.scale == 1.0 else hidden * self.scale
        logits = self.head(hidden.flatten(0, 1))
        caches = [t for i in range(len(self.scope.present)) for t in self.scope.present[i]]
        return logits.float(), *caches


class _CacheLength:
    """The part of a transformers cache that a decoder uses: its length."""

    is_updated: dict[int, bool] = {}  # noqa: RUF012
    is_compileable = False

    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def _with_bias(head: nn.Module, bias: Tensor) -> nn.Module:
    """Return an output layer that shares its matrix with `head` and adds `bias`."""
    new: QuantizedLinear | nn.Linear
    if isinstance(head, QuantizedLinear):
        new = head.with_outputs(head.out_features, True)
        new.matrix = head.matrix
    elif isinstance(head, nn.Linear):
        new = nn.Linear(head.in_features, head.out_features, True, device="meta")
        new.weight = head.weight
    else:
        return nn.Sequential(head, _AddBias(bias))
    old = head.bias
    new.bias = nn.Parameter(
        bias.detach() if old is None else bias.detach() + old.detach(), requires_grad=False
    )
    return new


class _AddBias(nn.Module):
    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Buffer(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def seq2seq_graphs(model: Any) -> list[GraphSpec]:
    """Return the two graphs of `model`, with small example inputs."""
    attentions, crosses = (attention_modules(model, "decoder_layers", cross) for cross in (False, True))
    ids, mask, token = (torch.ones(2, n, dtype=torch.int64) for n in (7, 7, 1))
    two = {0: "batch", 1: "encoder_length"}
    # one of each per layer, unless the layer was skipped
    cross = [f"{i}.encoder.{kind}" for i in range(len(crosses)) for kind in ("key", "value")]
    own = [f"{i}.decoder.{kind}" for i in range(len(attentions)) for kind in ("key", "value")]
    encoder = GraphSpec(
        "encoder_model", Seq2SeqEncoder(model), (ids, mask), ["input_ids", "attention_mask"],
        ["last_hidden_state", *(f"present.{n}" for n in cross)], (two, two),
    )  # fmt: skip

    def caches(modules: list[AttentionModule], length: int) -> list[Tensor]:
        shapes = [(2, attention.heads.kv_heads, length, attention.heads.head_dim) for attention in modules]
        return [torch.zeros(shape) for shape in shapes for _ in "kv"]

    decoder = GraphSpec(
        "decoder_with_past_model", Seq2SeqDecoderStep(model),
        (token, mask, caches(attentions, 5), caches(crosses, 7)),
        ["input_ids", "encoder_attention_mask", *(f"past_key_values.{n}" for n in [*own, *cross])],
        ["logits", *(f"present.{n}" for n in own)],
        (
            {0: "batch"}, two,
            [{0: "batch", 2: "past_length"}] * len(own), [{0: "batch", 2: "encoder_length"}] * len(cross),
        ),
    )  # fmt: skip
    return [encoder, decoder]
