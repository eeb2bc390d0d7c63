"""M2M100 and NLLB: BART's blocks for many languages. Source: transformers' modeling_m2m_100.py.

Positions are sines, computed for any length; they are counted over tokens without padding, from
pad_token_id + 1 on.
"""

from __future__ import annotations

from smelt.models.families.bart import embedding_scale
from smelt.models.families.family import (
    SEQ2SEQ_TASKS,
    Family,
    PositionEncoding,
    PublishedLearningRate,
    TokenizerFiles,
)

FAMILY = Family(
    name="m2m_100",
    tasks=SEQ2SEQ_TASKS,
    learning_rate=PublishedLearningRate(3e-5, 1024),  # as mBART's, whose shape it has
    embedding_scale=embedding_scale,
    # NLLB's; M2M100's own tokenizer also has a vocab.json
    position_encoding=PositionEncoding(is_sinusoidal=True),
    tokenizer_files=TokenizerFiles(("sentencepiece.bpe.model",)),
    unused_tensors=(
        r"(model\.)?(en|de)coder\.version",
        r"(model\.)?(en|de)coder\.embed_positions\.(weights|_float_tensor)",
    ),
    decoder_start="eos",
    forces_eos=True,
    language_selection="codes",
    example_languages=("eng_Latn", "deu_Latn"),  # NLLB's; M2M100's are en, de
)
