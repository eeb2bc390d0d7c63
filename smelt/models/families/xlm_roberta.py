"""XLM-RoBERTa: RoBERTa with a SentencePiece vocabulary of 100 languages.

Source: transformers' modeling_xlm_roberta.py (Conneau et al. 2020, arXiv:1911.02116).
"""

from __future__ import annotations

from dataclasses import replace

from smelt.models.families.family import TokenizerFiles
from smelt.models.families.roberta import FAMILY as ROBERTA
from smelt.models.families.roberta import ROBERTA_TOKENIZER

FAMILY = replace(
    ROBERTA,
    name="xlm-roberta",
    tokenizer_files=TokenizerFiles(("sentencepiece.bpe.model",)),
    tokenizer_spec=replace(
        ROBERTA_TOKENIZER,
        allowed_models=("unigram",),
        allowed_models_reason="XLM-RoBERTa's tokenizer is a unigram model: use unigram.",
    ),
)
