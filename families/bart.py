"""BART. Source: transformers' modeling_bart.py."""

from __future__ import annotations

from smelt.families.encoder_decoder import HEAD, LOGITS_BIAS, Plan, embedding_scale
from smelt.families.family import Family, Rate, TokenizerFiles
from smelt.families.roberta import TOKENIZER

FAIRSEQ_VERSION = r"(model\.)?(en|de)coder\.version"
FAMILY = Family(
    name="bart",
    kind="seq2seq",
    tasks=("summarization", "translation"),
    stacks=Plan(norms_first=False, opening=True, closing=False).stacks,
    embedding=("shared.weight", "encoder.embed_tokens.weight"),
    width="d_model",
    rate=Rate(3e-5, 1024),  # fairseq's examples/bart, for summarization
    head=HEAD,
    logits_bias=LOGITS_BIAS,
    embedding_scale=embedding_scale,
    tokenizer=TokenizerFiles(("vocab.json", "merges.txt")),
    new_tokenizer=TOKENIZER,
    unread=(FAIRSEQ_VERSION,),
    starts_with="eos",
    forces_end=True,
)
