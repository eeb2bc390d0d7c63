"""BART. Source: transformers' modeling_bart.py."""

from __future__ import annotations

from smelt.models.families.bart_layout import LM_HEAD, LOGITS_BIAS, BartLayout, embedding_scale
from smelt.models.families.family import Family, PublishedLearningRate, TokenizerFiles
from smelt.models.families.roberta import ROBERTA_TOKENIZER

FAIRSEQ_VERSION_TENSORS = r"(model\.)?(en|de)coder\.version"
FAMILY = Family(
    name="bart",
    architecture="seq2seq",
    tasks=("summarization", "translation"),
    stacks=BartLayout(pre_norm=False, has_embedding_norm=True, has_final_norm=False).stacks,
    embedding_suffixes=("shared.weight", "encoder.embed_tokens.weight"),
    hidden_size_key="d_model",
    learning_rate=PublishedLearningRate(3e-5, 1024),  # fairseq's examples/bart, for summarization
    head_modules=LM_HEAD,
    logits_bias=LOGITS_BIAS,
    embedding_scale=embedding_scale,
    tokenizer_files=TokenizerFiles(("vocab.json", "merges.txt")),
    tokenizer_spec=ROBERTA_TOKENIZER,
    unused_tensors=(FAIRSEQ_VERSION_TENSORS,),
    decoder_start="eos",
    forces_eos=True,
)
