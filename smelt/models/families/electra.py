"""ELECTRA's discriminator: BERT's blocks and RoBERTa's form of a classifier, with GELU in the head.

Source: transformers' modeling_electra.py (Clark et al. 2020, arXiv:2003.10555). ELECTRA-Small has narrower
embeddings than hidden states, with a linear layer between them; Base and Large have not.
"""

from __future__ import annotations

from smelt.models.families.bert import BERT_TOKENIZER, POSITION_IDS_TENSORS
from smelt.models.families.family import ENCODER_TASKS, Family, LayoutVariant, PublishedLearningRate

FAMILY = Family(
    name="electra",
    tasks=ENCODER_TASKS,
    # Clark et al. 2020, appendix B: Large, with less for lower layers; Base has 1e-4
    learning_rate=PublishedLearningRate(5e-5, 1024),
    layout_variants=(
        LayoutVariant(
            "equal-widths",
            applies=lambda config: config.get("embedding_size", 128) == config.get("hidden_size", 256),
            example={"embedding_size": 48},
        ),
    ),
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
