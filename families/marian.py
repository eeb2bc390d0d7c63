"""Marian: translators of OPUS-MT. Source: transformers' modeling_marian.py and tokenization_marian.py."""

from __future__ import annotations

from smelt.families.encoder_decoder import HEAD, LOGITS_BIAS, Plan, embedding_scale
from smelt.families.family import TEXT_TO_TEXT, Family, Positions, Rate, TokenizerFiles, TokenizerForm

FAMILY = Family(
    name="marian",
    kind="seq2seq",
    tasks=TEXT_TO_TEXT,
    stacks=Plan(norms_first=False, opening=False, closing=False).stacks,
    embedding=("shared.weight", "encoder.embed_tokens.weight"),
    width="d_model",
    rate=Rate(2e-5, 512),  # the translation chapter of Hugging Face's course
    head=HEAD,
    logits_bias=LOGITS_BIAS,
    embedding_scale=embedding_scale,
    positions=Positions(computed=True),
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
