"""OPT. Source: transformers' modeling_opt.py (Zhang et al. 2022, arXiv:2205.01068).

Blocks are a BART decoder's without cross-attention. They flatten their states to [texts * tokens, width]
before the feed-forward part. Positions are counted over tokens without padding; the first is row 2 of
the table, which has two more rows than the config's value.
"""

from __future__ import annotations

from smelt.models.families.bart import FAIRSEQ_VERSION_TENSORS
from smelt.models.families.family import (
    DECODER_TASKS,
    Family,
    LayoutVariant,
    PublishedLearningRate,
    TokenizerFiles,
    TokenizerSpec,
)
from smelt.models.families.layout import Config

_EOS_TOKEN = "</s>"


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config."""
    problems = []
    width, embed_dim = config.get("hidden_size"), config.get("word_embed_proj_dim")
    if embed_dim not in (None, width):
        problems.append(
            f"word_embed_proj_dim is {embed_dim} and hidden_size is {width}: an OPT with token embeddings of"
            " another width than its hidden states is not supported. Use a model with equal widths, as all"
            " published OPTs except OPT-350m."
        )
    if not config.get("do_layer_norm_before", True):
        problems.append(
            "do_layer_norm_before is false: an OPT with norms after the sums is not supported. Use"
            " a model where it is true, as all published OPTs except OPT-350m."
        )
    if not config.get("layer_norm_elementwise_affine", True):
        problems.append("layer_norm_elementwise_affine is false: norms without weights are not supported.")
    return problems


FAMILY = Family(
    name="opt",
    tasks=DECODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 4096),  # Stanford Alpaca's command for OPT-6.7B
    tokenizer_files=TokenizerFiles(("vocab.json", "merges.txt")),
    tokenizer_spec=TokenizerSpec(
        ("<s>", "<pad>", _EOS_TOKEN, "<unk>"),
        {"bos": _EOS_TOKEN, "eos": _EOS_TOKEN, "unk": _EOS_TOKEN, "pad": "<pad>"},
        f"{_EOS_TOKEN} $A",
        f"{_EOS_TOKEN} $A {_EOS_TOKEN} $B",
    ),
    layout_variants=(
        LayoutVariant(
            "no-final-norm",
            applies=lambda config: bool(config.get("_remove_final_layer_norm")),
            example={"_remove_final_layer_norm": True},
        ),
    ),
    separates_packed_sequences=False,  # its mask is made without position_ids
    unused_tensors=(FAIRSEQ_VERSION_TENSORS,),
    unsupported_config=unsupported_config,
)
