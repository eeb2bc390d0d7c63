"""The plan of BART and those that are built like it. Source: transformers' modeling_bart.py."""

from __future__ import annotations

from smelt.families.family import Attention, Config, FeedForward, Stack


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's and the decoder's blocks."""
    return (
        _stack("encoder", (_attention("self_attn"),)),
        _stack("decoder", (_attention("self_attn"), _attention("encoder_attn", cross=True))),
    )


def _stack(side: str, attentions: tuple[Attention, ...]) -> Stack:
    return Stack(
        name=f"{side}_layers",
        setting=f"{side}_layers",
        place=f"model.{side}.layers",
        attentions=attentions,
        feed_forward=FeedForward("", "fc1", "fc2", setting=f"{side}_ffn_dim"),
    )


def _attention(name: str, cross: bool = False) -> Attention:
    return Attention(
        name,
        query=f"{name}.q_proj",
        key=f"{name}.k_proj",
        value=f"{name}.v_proj",
        out=f"{name}.out_proj",
        heads="num_heads",
        width="head_dim",
        cross=cross,
    )
