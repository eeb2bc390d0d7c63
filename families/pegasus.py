"""Pegasus: BART's blocks with fixed positions. Source: transformers' modeling_pegasus.py."""

from __future__ import annotations

from smelt.families.encoder_decoder import HEAD, LOGITS_BIAS, Plan, embedding_scale
from smelt.families.family import Family, Positions, Rate, TokenizerFiles, TokenizerForm

FAMILY = Family(
    name="pegasus",
    kind="seq2seq",
    tasks=("summarization", "translation"),
    stacks=Plan(norms_first=True, opening=False, closing=True).stacks,
    embedding=("shared.weight", "encoder.embed_tokens.weight"),
    width="d_model",
    rate=Rate(3e-5, 1024),  # as BART's: its own paper trains with Adafactor
    head=HEAD,
    logits_bias=LOGITS_BIAS,
    embedding_scale=embedding_scale,
    positions=Positions(computed=True),
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
