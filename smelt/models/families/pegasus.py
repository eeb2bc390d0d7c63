"""Pegasus: BART's blocks with fixed positions. Source: transformers' modeling_pegasus.py."""

from __future__ import annotations

from smelt.models.families.bart import LM_HEAD, LOGITS_BIAS, BartLayout, embedding_scale
from smelt.models.families.family import (
    Family,
    PositionEncoding,
    PublishedLearningRate,
    TokenizerFiles,
    TokenizerSpec,
)

FAMILY = Family(
    name="pegasus",
    architecture="seq2seq",
    tasks=("summarization", "translation"),
    stacks=BartLayout(pre_norm=True, has_embedding_norm=False, has_final_norm=True).stacks,
    embedding_suffixes=("shared.weight", "encoder.embed_tokens.weight"),
    hidden_size_key="d_model",
    learning_rate=PublishedLearningRate(3e-5, 1024),  # as BART's: its own paper trains with Adafactor
    head_modules=LM_HEAD,
    logits_bias=LOGITS_BIAS,
    embedding_scale=embedding_scale,
    position_encoding=PositionEncoding(is_sinusoidal=True),
    tokenizer_files=TokenizerFiles(("spiece.model",)),
    tokenizer_spec=TokenizerSpec(
        ("<pad>", "</s>", "<mask_1>", "<unk>"),
        {"pad": "<pad>", "eos": "</s>", "mask": "<mask_1>", "unk": "<unk>"},
        "$A </s>",
        "$A $B </s>",
    ),
    # the sines of fixed positions, which the model computes
    unused_tensors=(r"(model\.)?(en|de)coder\.embed_positions\.weight",),
    forces_eos=True,
)
