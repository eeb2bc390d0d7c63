"""T5, v1.0 and v1.1. Source: transformers' modeling_t5.py; Raffel et al. 2020, arXiv:1910.10683.

Its attention uses distances: there is no table of positions, and `n_positions` of its configs is the
training length, which the model never uses. The first block of a stack has a bias per head and distance
and passes it to the others.
"""

from __future__ import annotations

from smelt.models.families.family import (
    SEQ2SEQ_TASKS,
    Attention,
    Config,
    Family,
    FeedForward,
    PositionEncoding,
    PublishedLearningRate,
    RelativeBias,
    ResidualStream,
    Stack,
    TokenizerFiles,
    TokenizerSpec,
)


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's and the decoder's blocks; v1.1 has gated feed-forward parts."""
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
            num_layers_fallback_key="num_layers",
        ),
    )


def _stream(side: str, parts: int) -> ResidualStream:
    return ResidualStream(
        (f"{side}.embed_tokens.weight",),
        part_norms=tuple(f"layer.{part}.layer_norm" for part in range(parts)),
        pre_norm=True,
        final_norm=f"{side}.final_layer_norm",
    )


def _attention(name: str, cross: bool = False) -> Attention:
    return Attention(
        name,
        query=f"{name}.q",
        key=f"{name}.k",
        value=f"{name}.v",
        out=f"{name}.o",
        heads_attribute="n_heads",
        head_dim_attribute="key_value_proj_dim",
        heads_key="num_heads",
        head_dim_key="d_kv",
        cross=cross,
        scale_attribute=None,
        relative_bias="handed_on",
    )


def _feed_forward(layer: str, gated: bool) -> FeedForward:
    at = f"{layer}.DenseReluDense"
    if gated:
        first, second = f"{at}.wi_0", f"{at}.wi_1"
        return FeedForward(at, first, f"{at}.wo", "d_ff", "dense_act_fn", gate=second, activated_layer="up")
    return FeedForward(at, f"{at}.wi", f"{at}.wo", "d_ff", "dense_act_fn")


def output_scale(config: Config) -> float:
    """Return the factor of the decoder's states if the token embedding is the output layer."""
    return float(config["d_model"]) ** -0.5 if config.get("scale_decoder_outputs") else 1.0


def relative_bias() -> RelativeBias:
    """Return the implementation of the bias of its attentions."""
    from smelt.models.families import t5_bias

    return t5_bias


FAMILY = Family(
    name="t5",
    architecture="seq2seq",
    tasks=SEQ2SEQ_TASKS,
    stacks=stacks,
    embedding_suffixes=("shared.weight", "encoder.embed_tokens.weight"),
    hidden_size_key="d_model",
    learning_rate=PublishedLearningRate(
        3e-4, 768
    ),  # transformers' page of T5: 1e-4 and 3e-4 suit most problems
    head_modules=("lm_head",),
    output_scale=output_scale,
    position_encoding=PositionEncoding(max_positions_key=None),
    tokenizer_files=TokenizerFiles(("spiece.model",)),
    tokenizer_spec=TokenizerSpec(
        ("<pad>", "</s>", "<unk>"),
        {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
        "$A </s>",
        "$A </s> $B </s>",
    ),
    # a bias of the first release that no code uses
    unused_tensors=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    relative_bias=relative_bias,
)
