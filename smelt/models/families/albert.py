"""ALBERT: one BERT block that is called for every layer, and narrow embeddings.

Source: transformers' modeling_albert.py (Lan et al. 2020, arXiv:1909.11942).
"""

from __future__ import annotations

from smelt.models.families.bert import POSITION_IDS_TENSORS
from smelt.models.families.family import (
    ENCODER_TASKS,
    Family,
    PublishedLearningRate,
    TokenizerFiles,
    TokenizerSpec,
)
from smelt.models.families.layout import Config


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config."""
    return [
        f"{key} is {config[key]}; only 1 is supported, as in all published ALBERTs."
        for key in ("num_hidden_groups", "inner_group_num")
        if config.get(key, 1) != 1
    ]


FAMILY = Family(
    name="albert",
    tasks=ENCODER_TASKS,
    learning_rate=PublishedLearningRate(1e-5, 4096),  # Lan et al. 2020, appendix A.4: 1e-5 to 5e-5
    tokenizer_files=TokenizerFiles(("spiece.model",)),
    tokenizer_spec=TokenizerSpec(
        ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"),
        {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
        "[CLS] $A [SEP]",
        "[CLS] $A [SEP] $B:1 [SEP]:1",
        uses_token_types=True,
        allowed_models=("unigram",),
        allowed_models_reason="ALBERT's tokenizer is a unigram model: use unigram.",
    ),
    unused_tensors=(POSITION_IDS_TENSORS,),
    other_head_tensors=(r"predictions\..+", r"sop_classifier\..+", r"qa_outputs\..+"),
    token_types="pairs",
    unsupported_config=unsupported_config,
)
