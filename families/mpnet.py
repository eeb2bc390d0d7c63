"""MPNet: BERT's blocks with a bias by distance that the encoder gives to all of them.

Source: transformers' modeling_mpnet.py. Positions count from the pad id, as RoBERTa's.
"""

from __future__ import annotations

from smelt.families.family import Attention, Config, Family, FeedForward, Positions, Stack
from smelt.families.roberta import TOKENIZER


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's blocks."""
    at = "attention.attn"
    attention = Attention(
        at,
        query=f"{at}.q",
        key=f"{at}.k",
        value=f"{at}.v",
        out=f"{at}.o",
        heads="num_attention_heads",
        width="attention_head_size",
        size="all_head_size",
        scale="width",
        relative="given",
        fixed_heads="all layers add one bias, which has a column for each head",
    )
    block = FeedForward("", "intermediate.dense", "output.dense", "intermediate_size")
    return (Stack("layers", "num_hidden_layers", "mpnet.encoder.layer", (attention,), block),)


FAMILY = Family(
    name="mpnet",
    kind="encoder",
    tasks=("text-classification",),
    stacks=stacks,
    embedding=("word_embeddings.weight",),
    width="hidden_size",
    positions=Positions(after_pad=True),
    new_tokenizer=TOKENIZER,
    unread=(r"(.+\.)?embeddings\.position_ids", r"(mpnet\.)?pooler\.dense\.(weight|bias)"),
    other_heads=(r"lm_head\..+", r"qa_outputs\..+"),
)
