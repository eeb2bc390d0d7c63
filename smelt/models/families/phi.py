"""Phi-1, Phi-1.5 and Phi-2: both parts of a block read one norm. Source: transformers' modeling_phi.py.

The first channels of a head are rotated, and the output layer has a bias (Gunasekar et al. 2023,
arXiv:2306.11644).
"""

from __future__ import annotations

from smelt.models.families.family import DECODER_TASKS, Family, PublishedLearningRate, TokenizerFiles
from smelt.models.families.gpt2 import GPT2_TOKENIZER
from smelt.models.families.layout import Config
from smelt.models.families.llama import INV_FREQ_TENSORS
from smelt.models.families.llama import unsupported_config as unsupported_rope


def _rotary_fraction(config: Config) -> float:
    """Return the part of a head that is rotated; transformers 4 stores it in the config itself."""
    sections = (config.get("rope_parameters") or {}, config)
    factors = [section.get("partial_rotary_factor") for section in sections]
    return float(next(filter(None, factors), 0.5))


def _unsupported_config(config: Config) -> list[str]:
    problems = unsupported_rope(config)
    if config.get("qk_layernorm"):
        problems.append("qk_layernorm is not supported; it must be false, as in all published Phis.")
    return problems


FAMILY = Family(
    name="phi",
    tasks=DECODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 4096),  # as Llama's
    ties_output=lambda config: bool(config.get("tie_word_embeddings", False)),
    rotary_fraction=_rotary_fraction,
    tokenizer_files=TokenizerFiles(("vocab.json", "merges.txt")),
    tokenizer_spec=GPT2_TOKENIZER,
    unused_tensors=(INV_FREQ_TENSORS,),
    unsupported_config=_unsupported_config,
)
