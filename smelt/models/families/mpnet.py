"""MPNet: BERT's blocks with a relative position bias that the encoder computes for all of them.

Source: transformers' modeling_mpnet.py. Positions count from the pad id, as RoBERTa's.
"""

from __future__ import annotations

from smelt.models.families.family import ENCODER_TASKS, Family, PositionEncoding, PublishedLearningRate
from smelt.models.families.roberta import ROBERTA_TOKENIZER

FAMILY = Family(
    name="mpnet",
    tasks=ENCODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 768),  # Song et al. 2020, appendix: 1e-5 to 3e-5
    attention_fields={
        "relative_bias": "given",
        "fixed_heads_reason": "all layers share one bias with a column for each head",
        "uses_attention_interface": False,
    },
    position_encoding=PositionEncoding(offset_by_pad_id=True),
    tokenizer_spec=ROBERTA_TOKENIZER,
    unused_tensors=(r"(.+\.)?embeddings\.position_ids", r"(mpnet\.)?pooler\.dense\.(weight|bias)"),
    other_head_tensors=(r"lm_head\..+", r"qa_outputs\..+"),
)
