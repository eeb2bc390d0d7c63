"""mBART: BART for many languages. Source: transformers' modeling_mbart.py and tokenization_mbart50.py."""

from __future__ import annotations

from smelt.families.bart import FAIRSEQ_VERSION
from smelt.families.encoder_decoder import HEAD, LOGITS_BIAS, Plan, embedding_scale
from smelt.families.family import TEXT_TO_TEXT, Family, Rate, TokenizerFiles

FAMILY = Family(
    name="mbart",
    kind="seq2seq",
    tasks=TEXT_TO_TEXT,
    stacks=Plan(norms_first=True, opening=True, closing=True).stacks,
    embedding=("shared.weight", "encoder.embed_tokens.weight"),
    width="d_model",
    rate=Rate(3e-5, 1024),  # Liu et al. 2020, mBART, section 3
    head=HEAD,
    logits_bias=LOGITS_BIAS,
    embedding_scale=embedding_scale,
    tokenizer=TokenizerFiles(("sentencepiece.bpe.model",)),
    unread=(FAIRSEQ_VERSION,),
    starts_with="eos",
    forces_end=True,
    languages="codes",
)
