"""ModernBERT. Source: transformers' modeling_modernbert.py.

One product makes queries, keys and values, which are rotated, with another base in blocks that see a window
than in those that see all; another makes what is activated and its gate.
"""

from __future__ import annotations

from dataclasses import replace

from smelt.families.bert import TOKENIZER
from smelt.families.family import Attention, Config, Family, FeedForward, Rate, Stack
from smelt.families.stream import Stream

# Rotations are traced, with angles that are the same for every text; `dynamic_rope_update` changes these.
_BY_LENGTH = ("dynamic", "longrope")


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's blocks."""
    attention = Attention(
        "attn",
        query="attn.Wqkv",
        key="attn.Wqkv",
        value="attn.Wqkv",
        out="attn.Wo",
        heads=None,
        width="head_dim",
        setting="num_attention_heads",
        packed="equal",
        scale="width",
        rotary=True,
    )
    block = FeedForward(
        "mlp",
        "mlp.Wi",
        "mlp.Wo",
        "intermediate_size",
        "hidden_activation",
        gate="mlp.Wi",
        gate_first=False,
        activated="up",
    )
    stream = Stream(
        ("model.embeddings.tok_embeddings.weight",),
        norms=("attn_norm", "mlp_norm"),  # the first block's attn_norm does nothing
        norms_first=True,
        opening="model.embeddings.norm",
        closing="model.final_norm",
    )
    place, by_layer = "model.layers", ("layer_types",)
    return (Stack("layers", "num_hidden_layers", place, (attention,), block, stream, by_layer=by_layer),)


def window(config: Config, number: int) -> int | None:
    """Return how far a block sees to each side, in tokens; None for as far as the text goes."""
    kinds, width = config.get("layer_types"), config.get("local_attention")
    if not isinstance(kinds, list) or not isinstance(width, int) or kinds[number] != "sliding_attention":
        return None
    return width // 2


def refuses(config: Config) -> list[str]:
    """Say what of a config smelt cannot follow."""
    found = []
    ropes = {**(config.get("rope_parameters") or {}), "all layers": config.get("rope_scaling")}
    for layers, rope in ropes.items():
        kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, dict) else None
        if kind in _BY_LENGTH:
            found.append(
                f"rotary positions of type '{kind}' ({layers}), which depend on the length of a text, are not"
                " supported by this version."
            )
    return found


FAMILY = Family(
    name="modernbert",
    kind="encoder",
    tasks=("text-classification", "sentence-similarity"),
    stacks=stacks,
    embedding=("tok_embeddings.weight",),
    width="hidden_size",
    rate=Rate(5e-5, 768),  # Warner et al. 2024, appendix: 1e-5 to 8e-5
    head=("head.dense", "head.norm", "classifier"),
    new_tokenizer=replace(TOKENIZER, types=False),
    other_heads=(r"(head|decoder)\..+",),
    window=window,
    first_stays="it has no norm before its attention, and the others have one",
    refuses=refuses,
)
