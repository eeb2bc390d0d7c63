"""Marian: translation models of OPUS-MT. Source: transformers' modeling_marian.py, tokenization_marian.py."""

from __future__ import annotations

from smelt.models.families.bart import LM_HEAD, LOGITS_BIAS, BartLayout, embedding_scale
from smelt.models.families.family import (
    SEQ2SEQ_TASKS,
    Family,
    PositionEncoding,
    PublishedLearningRate,
    TokenizerFiles,
    TokenizerSpec,
)

FAMILY = Family(
    name="marian",
    architecture="seq2seq",
    tasks=SEQ2SEQ_TASKS,
    stacks=BartLayout(pre_norm=False, has_embedding_norm=False, has_final_norm=False).stacks,
    embedding_suffixes=("shared.weight", "encoder.embed_tokens.weight"),
    hidden_size_key="d_model",
    learning_rate=PublishedLearningRate(2e-5, 512),  # the translation chapter of Hugging Face's course
    head_modules=LM_HEAD,
    logits_bias=LOGITS_BIAS,
    embedding_scale=embedding_scale,
    position_encoding=PositionEncoding(is_sinusoidal=True),
    tokenizer_files=TokenizerFiles(("source.spm", "target.spm", "vocab.json"), accepts_fast=False),
    tokenizer_spec=TokenizerSpec(
        allowed_models=("unigram", "bpe"),
        allowed_models_reason="Marian's tokenizer consists of SentencePiece models: use unigram or bpe.",
        sentencepiece=True,
    ),
    forces_eos=True,
    suppresses_pad=True,
    # The row is an input like any other, but it is tied to the output layer, whose softmax would change it;
    # Marian and CTranslate2 start from a zero embedding whatever the file holds.
    freezes_pad_row=True,
    language_selection="prefix",
)
