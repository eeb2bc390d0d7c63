"""Gemma 3, the language model: Gemma's blocks with norms of queries, keys and the outputs of the parts.

Most blocks have a window and rotary positions of another base. Source: transformers' modeling_gemma3.py
(Gemma Team 2025, arXiv:2503.19786). The models that also read images (`gemma3`) are another family.
"""

from __future__ import annotations

from dataclasses import replace

from smelt.models.families.gemma import FAMILY as GEMMA
from smelt.models.families.layout import Config
from smelt.models.families.qwen2 import attention_window


def _unsupported_config(config: Config) -> list[str]:
    softcaps = ("attn_logit_softcapping", "final_logit_softcapping")
    return GEMMA.unsupported_config(config) + [
        f"{key} is not supported; it must be null." for key in softcaps if config.get(key)
    ]


FAMILY = replace(GEMMA, name="gemma3_text", window=attention_window, unsupported_config=_unsupported_config)
