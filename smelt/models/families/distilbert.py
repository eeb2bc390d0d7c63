"""DistilBERT. Source: transformers' modeling_distilbert.py."""

from __future__ import annotations

from dataclasses import replace

from smelt.models.families.bert import BERT_TOKENIZER, POSITION_IDS_TENSORS
from smelt.models.families.family import ENCODER_TASKS, Family, PublishedLearningRate

FAMILY = Family(
    name="distilbert",
    tasks=ENCODER_TASKS,
    learning_rate=PublishedLearningRate(5e-5, 768),  # as BERT's
    tokenizer_spec=replace(BERT_TOKENIZER, uses_token_types=False),
    unused_tensors=(POSITION_IDS_TENSORS,),
    other_head_tensors=(r"vocab_(transform|layer_norm|projector)\..+", r"qa_outputs\..+"),
)
