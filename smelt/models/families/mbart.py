"""mBART: BART for many languages. Source: transformers' modeling_mbart.py and tokenization_mbart50.py."""

from __future__ import annotations

from smelt.models.families.bart import (
    FAIRSEQ_VERSION_TENSORS,
    embedding_scale,
)
from smelt.models.families.family import SEQ2SEQ_TASKS, Family, PublishedLearningRate, TokenizerFiles

FAMILY = Family(
    name="mbart",
    tasks=SEQ2SEQ_TASKS,
    learning_rate=PublishedLearningRate(3e-5, 1024),  # Liu et al. 2020, mBART, section 3
    embedding_scale=embedding_scale,
    tokenizer_files=TokenizerFiles(("sentencepiece.bpe.model",)),
    unused_tensors=(FAIRSEQ_VERSION_TENSORS,),
    decoder_start="eos",
    forces_eos=True,
    language_selection="codes",
)
