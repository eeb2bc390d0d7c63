"""BART. Source: transformers' modeling_bart.py."""

from __future__ import annotations

from smelt.families.encoder_decoder import stacks
from smelt.families.family import Family, TokenizerFiles
from smelt.families.roberta import TOKENIZER

FAIRSEQ_VERSION = r"(model\.)?(en|de)coder\.version"
FAMILY = Family(
    name="bart",
    kind="seq2seq",
    tasks=("summarization", "translation"),
    stacks=stacks,
    embedding=("shared.weight", "encoder.embed_tokens.weight"),
    width="d_model",
    tokenizer=TokenizerFiles(("vocab.json", "merges.txt")),
    new_tokenizer=TOKENIZER,
    unread=(FAIRSEQ_VERSION,),
    starts_with="eos",
    forces_end=True,
)
