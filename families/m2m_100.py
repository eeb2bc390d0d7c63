"""M2M100 and NLLB: BART's blocks for many languages. Source: transformers' modeling_m2m_100.py.

Positions are sines, computed for any length; they are counted over the tokens that are no padding, from
pad_token_id + 1 on.
"""

from __future__ import annotations

from smelt.families.encoder_decoder import HEAD, Plan, embedding_scale
from smelt.families.family import TEXT_TO_TEXT, Family, Positions, Rate, TokenizerFiles

FAMILY = Family(
    name="m2m_100",
    kind="seq2seq",
    tasks=TEXT_TO_TEXT,
    stacks=Plan(norms_first=True, opening=False, closing=True, positions="embed_positions.weights").stacks,
    embedding=("shared.weight", "encoder.embed_tokens.weight"),
    width="d_model",
    rate=Rate(3e-5, 1024),  # as mBART's, whose shape it has
    head=HEAD,
    embedding_scale=embedding_scale,
    # NLLB's; M2M100's own tokenizer has a vocab.json beside it
    positions=Positions(computed=True),
    tokenizer=TokenizerFiles(("sentencepiece.bpe.model",)),
    unread=(
        r"(model\.)?(en|de)coder\.version",
        r"(model\.)?(en|de)coder\.embed_positions\.(weights|_float_tensor)",
    ),
    starts_with="eos",
    forces_end=True,
    languages="codes",
    codes=("eng_Latn", "deu_Latn"),  # NLLB's; M2M100's are en, de
)
