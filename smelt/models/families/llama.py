"""Llama. Source: transformers' modeling_llama.py.

Several queries share a key and value head, and are removed together when heads are pruned; a neuron
has a row of gate and up and a column of down.
"""

from __future__ import annotations

from smelt.models.families.family import (
    DECODER_TASKS,
    Family,
    PublishedLearningRate,
    TokenizerFiles,
    TokenizerSpec,
)
from smelt.models.families.layout import Config

# Angles of rotary positions, stored with each layer before transformers 4.32.
INV_FREQ_TENSORS = r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
_SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config: scaling of positions."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return []
    by_layer_type = [section for section in rope.values() if isinstance(section, dict)]
    kinds = {str(section.get("rope_type") or section.get("type")) for section in by_layer_type or [rope]}
    return [
        f"rotary positions of type '{kind}' are not supported; supported: {', '.join(_SUPPORTED_ROPE_TYPES)}."
        for kind in sorted(kinds - {"None", *_SUPPORTED_ROPE_TYPES})
    ]


FAMILY = Family(
    name="llama",
    tasks=DECODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 4096),  # Touvron et al. 2023, Llama 2, section 3.1
    tokenizer_files=TokenizerFiles(("tokenizer.model",)),
    tokenizer_spec=TokenizerSpec(
        ("<unk>", "<s>", "</s>"),
        {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "</s>"},
        "<s> $A",
        "<s> $A $B",
    ),
    unused_tensors=(INV_FREQ_TENSORS,),
    unsupported_config=unsupported_config,
)
