"""Pegasus: BART's blocks with fixed positions. Source: transformers' modeling_pegasus.py."""

from __future__ import annotations

from smelt.models.families.bart import embedding_scale
from smelt.models.families.family import (
    Family,
    PositionEncoding,
    PublishedLearningRate,
    TokenizerFiles,
    TokenizerSpec,
)

FAMILY = Family(
    name="pegasus",
    tasks=("summarization", "translation"),
    learning_rate=PublishedLearningRate(3e-5, 1024),  # as BART's: its own paper trains with Adafactor
    embedding_scale=embedding_scale,
    position_encoding=PositionEncoding(is_sinusoidal=True),
    tokenizer_files=TokenizerFiles(("spiece.model",)),
    tokenizer_spec=TokenizerSpec(
        ("<pad>", "</s>", "<mask_1>", "<unk>"),
        {"pad": "<pad>", "eos": "</s>", "mask": "<mask_1>", "unk": "<unk>"},
        "$A </s>",
        "$A $B </s>",
    ),
    # the sines of fixed positions, which the model computes
    unused_tensors=(r"(model\.)?(en|de)coder\.embed_positions\.weight",),
    forces_eos=True,
)
