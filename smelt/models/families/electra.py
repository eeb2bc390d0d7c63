"""ELECTRA's discriminator: BERT's blocks and RoBERTa's form of a classifier, with GELU in the head.

Source: transformers' modeling_electra.py (Clark et al. 2020, arXiv:2003.10555). ELECTRA-Small has embeddings
of another width than its hidden states, with a linear layer between them, which `ResidualStream` does not
describe.
"""

from __future__ import annotations

from smelt.models.families.bert import BERT_TOKENIZER, POSITION_IDS_TENSORS, encoder_stack
from smelt.models.families.family import Config, Family, PublishedLearningRate, Stack


def stacks(config: Config) -> tuple[Stack, ...]:
    """Return the encoder's blocks."""
    return encoder_stack("electra")


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config."""
    # save_pretrained leaves out what is the default of transformers' ElectraConfig
    words, width = config.get("embedding_size", 128), config.get("hidden_size", 256)
    if words == width:
        return []
    return [
        f"embedding_size is {words} and hidden_size is {width}: an ELECTRA with token embeddings of another"
        " width than its hidden states is not supported. Use a model with equal widths, such as the"
        " discriminators of ELECTRA-Base and ELECTRA-Large."
    ]


FAMILY = Family(
    name="electra",
    architecture="encoder",
    tasks=("text-classification", "sentence-similarity"),
    stacks=stacks,
    embedding_suffixes=("word_embeddings.weight",),
    hidden_size_key="hidden_size",
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
    unsupported_config=unsupported_config,
)
