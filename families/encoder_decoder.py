"""The plan of BART and those that are built like it. Source: transformers' modeling_bart.py."""

from __future__ import annotations

from dataclasses import dataclass

from smelt.families.family import Attention, Config, FeedForward, Stack
from smelt.families.stream import Stream

HEAD = ("lm_head",)
LOGITS_BIAS = "final_logits_bias"


@dataclass(frozen=True)
class Plan:
    """In what those that are built like BART differ.

    norms_first: see `Stream`. opening, closing: each side norms what its blocks begin with, and what they
    give. positions: the tensor of a side's table of positions.
    """

    norms_first: bool
    opening: bool
    closing: bool
    positions: str = "embed_positions.weight"

    def stacks(self, config: Config) -> tuple[Stack, ...]:
        """Return the encoder's and the decoder's blocks."""
        return (
            self._stack("encoder", (attention("self_attn", "encoder_attention_heads"),)),
            self._stack(
                "decoder",
                (
                    attention("self_attn", "decoder_attention_heads"),
                    attention("encoder_attn", "decoder_attention_heads", cross=True),
                ),
            ),
        )

    def _stack(self, side: str, attentions: tuple[Attention, ...]) -> Stack:
        at = f"model.{side}"
        stream = Stream(
            (f"{at}.embed_tokens.weight", f"{at}.{self.positions}"),
            norms=(*(f"{attention.name}_layer_norm" for attention in attentions), "final_layer_norm"),
            norms_first=self.norms_first,
            opening=f"{at}.layernorm_embedding" if self.opening else None,
            closing=f"{at}.layer_norm" if self.closing else None,
        )
        return Stack(
            name=f"{side}_layers",
            setting=f"{side}_layers",
            place=f"{at}.layers",
            attentions=attentions,
            feed_forward=FeedForward(
                "", "fc1", "fc2", setting=f"{side}_ffn_dim", activation="activation_function"
            ),
            stream=stream,
            causal=side == "decoder",
        )


def embedding_scale(config: Config) -> float:
    """Return what the rows of the word embedding are multiplied with."""
    return float(config["d_model"]) ** 0.5 if config.get("scale_embedding") else 1.0


def attention(name: str, setting: str, cross: bool = False) -> Attention:
    """Return an attention of BART's make; `setting` is the config's word for its heads."""
    return Attention(
        name,
        query=f"{name}.q_proj",
        key=f"{name}.k_proj",
        value=f"{name}.v_proj",
        out=f"{name}.out_proj",
        heads="num_heads",
        width="head_dim",
        setting=setting,
        cross=cross,
    )
