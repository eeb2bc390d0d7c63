"""ELECTRA's discriminator: BERT's blocks and RoBERTa's form of a classifier, with GELU in the head.

Source: transformers' modeling_electra.py (Clark et al. 2020, arXiv:2003.10555). ELECTRA-Small has narrower
embeddings than hidden states, with a linear layer between them.
"""

from __future__ import annotations

from dataclasses import replace

from smelt.models.families.bert import BERT_TOKENIZER, POSITION_IDS_TENSORS, encoder_stack
from smelt.models.families.family import Config, Family, PublishedLearningRate, Stack


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's blocks."""
    (stack,) = encoder_stack("electra")
    if FAMILY.embedding_size(config) == (FAMILY.hidden_size(config) or 256):
        return (stack,)
    stream = replace(stack.stream, embedding_projection="electra.embeddings_project")
    return (replace(stack, stream=stream),)


FAMILY = Family(
    name="electra",
    architecture="encoder",
    tasks=("text-classification", "sentence-similarity"),
    stacks=stacks,
    embedding_suffixes=("word_embeddings.weight",),
    hidden_size_key="hidden_size",
    embedding_size_key="embedding_size",
    default_embedding_size=128,
    # Clark et al. 2020, appendix B: Large, with less for lower layers; Base has 1e-4
    learning_rate=PublishedLearningRate(5e-5, 1024),
    head_modules=("classifier.dense", "classifier.out_proj"),
    tokenizer_spec=BERT_TOKENIZER,
    unused_tensors=(POSITION_IDS_TENSORS,),
    other_head_tensors=(
        r"discriminator_predictions\..+",
        r"generator_predictions\..+",
        r"generator_lm_head\..+",
        r"sequence_summary\..+",
        r"qa_outputs\..+",
    ),
    token_types="pairs",
)
