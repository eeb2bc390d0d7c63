"""GPT-NeoX and Pythia: both parts of a block read its input. Source: transformers' modeling_gpt_neox.py.

One linear layer computes queries, keys and values, with the rows of a head together. The first channels of a
head are rotated (Black et al. 2022, arXiv:2204.06745, section 2.1).
"""

from __future__ import annotations

from smelt.models.families.family import DECODER_TASKS, Family, PublishedLearningRate, TokenizerFiles
from smelt.models.families.gpt2 import GPT2_TOKENIZER
from smelt.models.families.layout import Config
from smelt.models.families.llama import unsupported_config


def rotary_fraction(config: Config) -> float:
    """Return the part of a head that is rotated; transformers 4 stores it as `rotary_pct`."""
    rope = config.get("rope_parameters") or {}
    return float(rope.get("partial_rotary_factor") or config.get("rotary_pct") or 0.25)


FAMILY = Family(
    name="gpt_neox",
    tasks=DECODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 4096),  # as Llama's
    attention_fields={"packed": "per_head"},
    ties_output=lambda config: bool(config.get("tie_word_embeddings", False)),
    rotary_fraction=rotary_fraction,
    tokenizer_files=TokenizerFiles(),
    tokenizer_spec=GPT2_TOKENIZER,
    renamed_tensors=((r"^embed_out\.", "lm_head."),),
    published_tensors=((r"^lm_head\.", "embed_out."),),
    # the causal mask of each layer, the value for minus infinity, and angles
    unused_tensors=(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    unsupported_config=unsupported_config,
)
