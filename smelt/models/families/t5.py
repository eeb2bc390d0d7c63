"""T5, v1.0 and v1.1. Source: transformers' modeling_t5.py; Raffel et al. 2020, arXiv:1910.10683.

Its attention uses distances: there is no table of positions, and `n_positions` of its configs is the
training length, which the model never uses. The first block of a stack has a bias per head and distance
and passes it to the others.
"""

from __future__ import annotations

from smelt.models.families.family import (
    SEQ2SEQ_TASKS,
    Family,
    LayoutVariant,
    PositionEncoding,
    PublishedLearningRate,
    TokenizerFiles,
    TokenizerSpec,
)
from smelt.models.families.layout import Config
from smelt.models.families.relative_bias import RelativeBias


def ties_output(config: Config) -> bool:
    """Return whether the token embedding is the output layer; `tie_word_embeddings` may be true anyway."""
    return bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True)))


def output_scale(config: Config) -> float:
    """Return the factor of the decoder's states if the token embedding is the output layer."""
    return float(config.get("d_model", 512)) ** -0.5 if ties_output(config) else 1.0


def relative_bias() -> RelativeBias:
    """Return the implementation of the bias of its attentions."""
    from smelt.models.families import t5_bias

    return t5_bias


FAMILY = Family(
    name="t5",
    tasks=SEQ2SEQ_TASKS,
    learning_rate=PublishedLearningRate(3e-4, 768),  # transformers' page of T5: 1e-4, 3e-4 suit most problems
    layout_variants=(
        LayoutVariant(
            "gated",
            applies=lambda config: str(config.get("feed_forward_proj", "relu")).startswith("gated-"),
            example={"feed_forward_proj": "gated-gelu"},
        ),
    ),
    attention_fields={"relative_bias": "handed_on"},
    num_layers_fallback_key="num_layers",
    output_scale=output_scale,
    ties_output=ties_output,
    position_encoding=PositionEncoding(max_positions_key=None),
    tokenizer_files=TokenizerFiles(("spiece.model",), byte_class="ByT5Tokenizer"),
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
