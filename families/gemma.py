"""Gemma: Llama's blocks; its norms multiply with 1 + weight, its embedding is scaled inside its module.

Source: transformers' modeling_gemma.py. Gemma 2 and 3 cap their scores and outputs and norm after each part,
and are other families.
"""

from __future__ import annotations

from smelt.families.family import Config, Family, Rate, RmsNorm, TokenizerFiles, TokenizerForm
from smelt.families.llama import HEAD, refuses, stacks


def _refuses(config: Config) -> list[str]:
    found = refuses(config)
    if config.get("use_bidirectional_attention"):
        found.append("use_bidirectional_attention is not supported; a token must see no later one.")
    return found


FAMILY = Family(
    name="gemma",
    kind="decoder",
    tasks=("language-modeling",),
    stacks=stacks,
    embedding=("embed_tokens.weight",),
    width="hidden_size",
    rate=Rate(2e-5, 4096),  # as Llama's
    head=HEAD,
    embedding_scale=lambda config: float(config["hidden_size"]) ** 0.5,
    tokenizer=TokenizerFiles(("tokenizer.model",)),
    new_tokenizer=TokenizerForm(
        ("<pad>", "<eos>", "<bos>", "<unk>"),
        {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>"},
        "<bos> $A",
        "<bos> $A $B",
    ),
    rms_norm=RmsNorm(epsilon="eps", plus_one=True),
    refuses=_refuses,
)
