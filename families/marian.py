"""Marian: translators of OPUS-MT. Source: transformers' modeling_marian.py and tokenization_marian.py."""

from __future__ import annotations

from smelt.families.encoder_decoder import stacks
from smelt.families.family import TEXT_TO_TEXT, Family, TokenizerFiles, TokenizerForm

FAMILY = Family(
    name="marian",
    kind="seq2seq",
    tasks=TEXT_TO_TEXT,
    stacks=stacks,
    embedding=("shared.weight", "encoder.embed_tokens.weight"),
    width="d_model",
    tokenizer=TokenizerFiles(("source.spm", "target.spm", "vocab.json"), fast=False),
    new_tokenizer=TokenizerForm(
        kinds=("unigram", "bpe"),
        why_kinds="Marian's tokenizer is made of SentencePiece models: train unigram or bpe.",
        sentencepiece=True,
    ),
    forces_end=True,
    bars_pad=True,
    # The row is an input like any other, but it is tied to the output head, whose softmax would move it;
    # Marian and CTranslate2 start from a zero embedding whatever the file says.
    holds_pad_row=True,
    languages="prefix",
)
