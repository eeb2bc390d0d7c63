"""MPNet: BERT's blocks with a bias by distance that the encoder gives to all of them.

Source: transformers' modeling_mpnet.py. Positions count from the pad id, as RoBERTa's.
"""

from __future__ import annotations

from smelt.families.family import Attention, Config, Family, FeedForward, Positions, Rate, Stack
from smelt.families.roberta import TOKENIZER
from smelt.families.stream import Stream


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
        setting="num_attention_heads",
        scale="width",
        relative="given",
        fixed_heads="all layers add one bias, which has a column for each head",
        interface=False,
    )
    block = FeedForward("", "intermediate.dense", "output.dense", "intermediate_size", "hidden_act")
    embeddings = "mpnet.embeddings"
    stream = Stream(
        (f"{embeddings}.word_embeddings.weight", f"{embeddings}.position_embeddings.weight"),
        norms=("attention.LayerNorm", "output.LayerNorm"),
        norms_first=False,
        opening=f"{embeddings}.LayerNorm",
    )
    return (Stack("layers", "num_hidden_layers", "mpnet.encoder.layer", (attention,), block, stream),)


FAMILY = Family(
    name="mpnet",
    kind="encoder",
    tasks=("text-classification", "sentence-similarity"),
    stacks=stacks,
    embedding=("word_embeddings.weight",),
    width="hidden_size",
    rate=Rate(2e-5, 768),  # Song et al. 2020, appendix: 1e-5 to 3e-5
    head=("classifier.dense", "classifier.out_proj"),
    positions=Positions(after_pad=True),
    new_tokenizer=TOKENIZER,
    unread=(r"(.+\.)?embeddings\.position_ids", r"(mpnet\.)?pooler\.dense\.(weight|bias)"),
    other_heads=(r"lm_head\..+", r"qa_outputs\..+"),
)
