"""ModernBERT. Source: transformers' modeling_modernbert.py.

One linear layer computes queries, keys and values, which are rotated, with different bases in blocks with a
window and in those without; another computes the activated part and its gate.
"""

from __future__ import annotations

from dataclasses import replace

from smelt.models.families.bert import BERT_TOKENIZER
from smelt.models.families.family import ENCODER_TASKS, Family, PublishedLearningRate
from smelt.models.families.layout import Config

# Rotations are traced with fixed angles; `dynamic_rope_update` changes angles by text length.
_LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")


def attention_window(config: Config, layer_index: int) -> int | None:
    """Return the attention window of a block to each side, in tokens; None for all."""
    kinds, width = config.get("layer_types"), config.get("local_attention")
    if not isinstance(kinds, list) or not isinstance(width, int) or kinds[layer_index] != "sliding_attention":
        return None
    return width // 2


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config."""
    problems = []
    ropes = {**(config.get("rope_parameters") or {}), "all layers": config.get("rope_scaling")}
    for layers, rope in ropes.items():
        kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, dict) else None
        if kind in _LENGTH_DEPENDENT_ROPE_TYPES:
            problems.append(
                f"rotary positions of type '{kind}' ({layers}) depend on the length of a text and are not"
                " supported."
            )
    return problems


FAMILY = Family(
    name="modernbert",
    tasks=ENCODER_TASKS,
    learning_rate=PublishedLearningRate(5e-5, 768),  # Warner et al. 2024, appendix: 1e-5 to 8e-5
    tokenizer_spec=replace(BERT_TOKENIZER, uses_token_types=False),
    other_head_tensors=(r"(head|decoder)\..+",),
    window=attention_window,
    first_layer_reason="unlike the other layers it has no norm before the attention",
    unsupported_config=unsupported_config,
)
