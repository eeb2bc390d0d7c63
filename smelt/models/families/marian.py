"""Marian: translation models of OPUS-MT. Source: transformers' modeling_marian.py, tokenization_marian.py."""

from __future__ import annotations

from smelt.models.families.bart import embedding_scale
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
    tasks=SEQ2SEQ_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 512),  # the translation chapter of Hugging Face's course
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
