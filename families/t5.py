"""T5, v1.0 and v1.1. Source: transformers' modeling_t5.py; Raffel et al. 2020, arXiv:1910.10683.

Its attention counts distances: there is no table of positions, and the `n_positions` of its configs is the
length it was trained on, which the model never reads. A bias per head and distance is owned by the first
block of a stack, which hands it on to the others.
"""

from __future__ import annotations

from smelt.families.family import (
    TEXT_TO_TEXT,
    Attention,
    Config,
    Family,
    FeedForward,
    Positions,
    Rate,
    Stack,
    TokenizerFiles,
    TokenizerForm,
)
from smelt.families.relative_bias import RelativeBias
from smelt.families.stream import Stream


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's and the decoder's blocks; v1.1 has a gate in its feed-forward parts."""
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated-")
    own, cross = _attention("layer.0.SelfAttention"), _attention("layer.1.EncDecAttention", cross=True)
    return (
        Stack(
            "encoder_layers",
            "num_layers",
            "encoder.block",
            (own,),
            _feed_forward("layer.1", gated),
            _stream("encoder", 2),
        ),
        Stack(
            "decoder_layers",
            "num_decoder_layers",
            "decoder.block",
            (own, cross),
            _feed_forward("layer.2", gated),
            _stream("decoder", 3),
            causal=True,
            setting_else="num_layers",
        ),
    )


def _stream(side: str, parts: int) -> Stream:
    return Stream(
        (f"{side}.embed_tokens.weight",),
        norms=tuple(f"layer.{part}.layer_norm" for part in range(parts)),
        norms_first=True,
        closing=f"{side}.final_layer_norm",
    )


def _attention(name: str, cross: bool = False) -> Attention:
    return Attention(
        name,
        query=f"{name}.q",
        key=f"{name}.k",
        value=f"{name}.v",
        out=f"{name}.o",
        heads="n_heads",
        width="key_value_proj_dim",
        setting="num_heads",
        width_setting="d_kv",
        cross=cross,
        scale=None,
        relative="handed_on",
    )


def _feed_forward(layer: str, gated: bool) -> FeedForward:
    at = f"{layer}.DenseReluDense"
    if gated:
        first, second = f"{at}.wi_0", f"{at}.wi_1"
        return FeedForward(at, first, f"{at}.wo", "d_ff", "dense_act_fn", gate=second, activated="up")
    return FeedForward(at, f"{at}.wi", f"{at}.wo", "d_ff", "dense_act_fn")


def output_scale(config: Config) -> float:
    """Return what the decoder's states are multiplied with where the word embedding is the output layer."""
    return float(config["d_model"]) ** -0.5 if config.get("scale_decoder_outputs") else 1.0


def relative_bias() -> RelativeBias:
    """Return what knows the bias of its attentions."""
    from smelt.families import t5_bias

    return t5_bias


FAMILY = Family(
    name="t5",
    kind="seq2seq",
    tasks=TEXT_TO_TEXT,
    stacks=stacks,
    embedding=("shared.weight", "encoder.embed_tokens.weight"),
    width="d_model",
    rate=Rate(3e-4, 768),  # transformers' page of T5: 1e-4 and 3e-4 suit most problems
    head=("lm_head",),
    output_scale=output_scale,
    keeps_float32=("wo",),
    positions=Positions(table=None),
    tokenizer=TokenizerFiles(("spiece.model",)),
    new_tokenizer=TokenizerForm(
        ("<pad>", "</s>", "<unk>"),
        {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
        "$A </s>",
        "$A </s> $B </s>",
    ),
    # a bias that the first release trained with and that no code ever read
    unread=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    relative_bias=relative_bias,
)
