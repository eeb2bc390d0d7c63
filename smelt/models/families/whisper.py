"""Whisper: speech recognition. Source: transformers' modeling_whisper.py."""

from __future__ import annotations

from smelt.models.families.bart import embedding_scale
from smelt.models.families.family import (
    SPEECH_TASKS,
    Family,
    PositionEncoding,
    PublishedLearningRate,
    TokenizerFiles,
)

FAMILY = Family(
    name="whisper",
    tasks=SPEECH_TASKS,
    learning_rate=PublishedLearningRate(1e-5, 768),  # Hugging Face's audio course, for whisper-small
    input_kind="audio",
    embedding_scale=embedding_scale,
    position_encoding=PositionEncoding("max_target_positions"),
    tokenizer_files=TokenizerFiles(("vocab.json", "merges.txt")),
)
