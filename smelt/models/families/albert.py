"""ALBERT: one BERT block that is called for every layer, and narrow embeddings.

Source: transformers' modeling_albert.py (Lan et al. 2020, arXiv:1909.11942).
"""

from __future__ import annotations

from smelt.models.families.bert import POSITION_IDS_TENSORS
from smelt.models.families.family import (
    Attention,
    Config,
    Family,
    FeedForward,
    PublishedLearningRate,
    ResidualStream,
    Stack,
    TokenizerFiles,
    TokenizerSpec,
)


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's block."""
    at = "attention"
    attention = Attention(
        at,
        query=f"{at}.query",
        key=f"{at}.key",
        value=f"{at}.value",
        out=f"{at}.dense",
        heads_attribute="num_attention_heads",
        head_dim_attribute="attention_head_size",
        heads_key="num_attention_heads",
        residual_norm=f"{at}.LayerNorm",
    )
    embeddings = "albert.embeddings"
    tables = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    stream = ResidualStream(
        tuple(f"{embeddings}.{table}.weight" for table in tables),
        part_norms=("attention.LayerNorm", "full_layer_layer_norm"),
        pre_norm=False,
        embedding_norm=f"{embeddings}.LayerNorm",
        embedding_projection="albert.encoder.embedding_hidden_mapping_in",
    )
    return (
        Stack(
            "layers",
            "num_hidden_layers",
            "albert.encoder.albert_layer_groups.0.albert_layers",
            (attention,),
            FeedForward("", "ffn", "ffn_output", "intermediate_size", "hidden_act"),
            stream,
            repeats_block=True,
        ),
    )


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config."""
    return [
        f"{key} is {config[key]}; only 1 is supported, as in all published ALBERTs."
        for key in ("num_hidden_groups", "inner_group_num")
        if config.get(key, 1) != 1
    ]


FAMILY = Family(
    name="albert",
    architecture="encoder",
    tasks=("text-classification", "sentence-similarity"),
    stacks=stacks,
    embedding_suffixes=("word_embeddings.weight",),
    hidden_size_key="hidden_size",
    embedding_size_key="embedding_size",
    default_embedding_size=128,
    learning_rate=PublishedLearningRate(1e-5, 4096),  # Lan et al. 2020, table 14: 1e-5 to 5e-5
    head_modules=("albert.pooler", "classifier"),
    tokenizer_files=TokenizerFiles(("spiece.model",)),
    tokenizer_spec=TokenizerSpec(
        ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"),
        {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
        "[CLS] $A [SEP]",
        "[CLS] $A [SEP] $B:1 [SEP]:1",
        uses_token_types=True,
        allowed_models=("unigram",),
        allowed_models_reason="ALBERT's tokenizer is a unigram model: use unigram.",
    ),
    unused_tensors=(POSITION_IDS_TENSORS,),
    other_head_tensors=(r"predictions\..+", r"sop_classifier\..+", r"qa_outputs\..+"),
    token_types="pairs",
    unsupported_config=unsupported_config,
)
