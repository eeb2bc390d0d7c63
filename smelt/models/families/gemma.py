"""Gemma: Llama's blocks; its norms multiply by 1 + weight, its embedding is scaled inside its module.

Source: transformers' modeling_gemma.py. Gemma 2 and 3 have norms after each part, and Gemma 2 caps its scores
and outputs; they are other families.
"""

from __future__ import annotations

from smelt.models.families.family import (
    DECODER_TASKS,
    Family,
    PublishedLearningRate,
    RmsNormForm,
    TokenizerFiles,
    TokenizerSpec,
)
from smelt.models.families.layout import Config
from smelt.models.families.llama import unsupported_config


def _unsupported_config(config: Config) -> list[str]:
    problems = unsupported_config(config)
    if config.get("use_bidirectional_attention"):
        problems.append("use_bidirectional_attention is not supported; attention must be causal.")
    return problems


FAMILY = Family(
    name="gemma",
    tasks=DECODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 4096),  # as Llama's
    embedding_scale=lambda config: float(config["hidden_size"]) ** 0.5,
    tokenizer_files=TokenizerFiles(("tokenizer.model",)),
    tokenizer_spec=TokenizerSpec(
        ("<pad>", "<eos>", "<bos>", "<unk>"),
        {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>"},
        "<bos> $A",
        "<bos> $A $B",
    ),
    rms_norm=RmsNormForm(epsilon_attribute="eps", adds_one_to_weight=True),
    unsupported_config=_unsupported_config,
)
