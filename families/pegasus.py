"""Pegasus: BART's blocks with fixed positions. Source: transformers' modeling_pegasus.py."""

from __future__ import annotations

from smelt.families.encoder_decoder import stacks
from smelt.families.family import Family, TokenizerFiles, TokenizerForm

FAMILY = Family(
    name="pegasus",
    kind="seq2seq",
    tasks=("summarization", "translation"),
    stacks=stacks,
    embedding=("shared.weight", "encoder.embed_tokens.weight"),
    width="d_model",
    tokenizer=TokenizerFiles(("spiece.model",)),
    new_tokenizer=TokenizerForm(
        ("<pad>", "</s>", "<mask_1>", "<unk>"),
        {"pad": "<pad>", "eos": "</s>", "mask": "<mask_1>", "unk": "<unk>"},
        "$A </s>",
        "$A $B </s>",
    ),
    # the sines of fixed positions, which the model computes
    unread=(r"(model\.)?(en|de)coder\.embed_positions\.weight",),
    forces_end=True,
)
