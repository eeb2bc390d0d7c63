"""Phi-3: Llama's blocks with packed linear layers. Source: transformers' modeling_phi3.py.

One linear layer computes queries, keys and values, with the rows of their heads; another computes gate and
up. Its attention takes the number of heads from the config, the same for all blocks, so none can be removed.
"""

from __future__ import annotations

from smelt.models.families.family import DECODER_TASKS, Family, PublishedLearningRate, TokenizerFiles
from smelt.models.families.layout import Config
from smelt.models.families.llama import FAMILY as LLAMA
from smelt.models.families.llama import unsupported_config
from smelt.models.families.mistral import attention_window


def _unsupported_config(config: Config) -> list[str]:
    problems = unsupported_config(config)
    rope = config.get("rope_parameters")  # transformers 5 stores it there, 4 in the config itself
    factors = [
        section.get("partial_rotary_factor") for section in (config, rope) if isinstance(section, dict)
    ]
    if any(factor not in (None, 1) for factor in factors):
        problems.append("partial_rotary_factor is not supported; it must be 1.")
    return problems


FAMILY = Family(
    name="phi3",
    tasks=DECODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 4096),  # as Llama's
    attention_fields={
        "fixed_heads_reason": "the number of heads is set in the config, the same for all layers"
    },
    tokenizer_files=TokenizerFiles(("tokenizer.model",)),
    tokenizer_spec=LLAMA.tokenizer_spec,
    window=attention_window,
    unsupported_config=_unsupported_config,
)
