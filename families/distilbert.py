"""DistilBERT. Source: transformers' modeling_distilbert.py."""

from __future__ import annotations

from dataclasses import replace

from smelt.families.bert import POSITION_IDS, TOKENIZER
from smelt.families.family import Attention, Config, Family, FeedForward, Rate, Stack
from smelt.families.stream import Stream


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's blocks."""
    at = "attention"
    attention = Attention(
        at,
        query=f"{at}.q_lin",
        key=f"{at}.k_lin",
        value=f"{at}.v_lin",
        out=f"{at}.out_lin",
        heads="n_heads",
        width="attention_head_size",
        setting="n_heads",
    )
    block = FeedForward("ffn", "ffn.lin1", "ffn.lin2", "hidden_dim", "activation")
    embeddings = "distilbert.embeddings"
    stream = Stream(
        (f"{embeddings}.word_embeddings.weight", f"{embeddings}.position_embeddings.weight"),
        norms=("sa_layer_norm", "output_layer_norm"),
        norms_first=False,
        opening=f"{embeddings}.LayerNorm",
    )
    return (Stack("layers", "n_layers", "distilbert.transformer.layer", (attention,), block, stream),)


FAMILY = Family(
    name="distilbert",
    kind="encoder",
    tasks=("text-classification", "sentence-similarity"),
    stacks=stacks,
    embedding=("word_embeddings.weight",),
    width="dim",
    rate=Rate(5e-5, 768),  # as BERT's
    head=("pre_classifier", "classifier"),
    new_tokenizer=replace(TOKENIZER, types=False),
    unread=(POSITION_IDS,),
    other_heads=(r"vocab_(transform|layer_norm|projector)\..+", r"qa_outputs\..+"),
)
