"""DeBERTa-v2 and v3, mDeBERTa: BERT's blocks with disentangled attention, without positions in the input.

Source: transformers' modeling_deberta_v2.py (He et al. 2021, arXiv:2006.03654 and arXiv:2111.09543). The
scores of a head are the sum of three products: queries and keys, queries and projected embeddings of
distances, keys and projected embeddings of distances. Near distances have an embedding each; far ones share
logarithmic buckets.
"""

from __future__ import annotations

from typing import Any

from smelt.models.families.bert import POSITION_IDS_TENSORS
from smelt.models.families.family import (
    ENCODER_TASKS,
    Family,
    PublishedLearningRate,
    TokenizerFiles,
    TokenizerSpec,
)
from smelt.models.families.layout import Config

_SUPPORTED: Config = {
    "relative_attention": True,
    "share_att_key": True,
    "position_biased_input": False,
    "norm_rel_ebd": "layer_norm",
    "type_vocab_size": 0,
    "conv_kernel_size": 0,
}
_DEFAULTS: Config = {"relative_attention": False, "position_biased_input": True, "norm_rel_ebd": "none"}


def unsupported_config(config: Config) -> list[str]:
    """Return the unsupported settings of a config; those of all published v3 models are supported."""
    problems = [
        f"{key} is {value!r}; only {supported!r} is supported, as in DeBERTa-v3."
        for key, supported in _SUPPORTED.items()
        if (value := config.get(key, _DEFAULTS.get(key, 0))) != supported
    ]
    terms = config.get("pos_att_type") or ()
    names = terms.split("|") if isinstance(terms, str) else terms
    if {str(name).strip().lower() for name in names} != {"c2p", "p2c"}:
        problems.append(f"pos_att_type is {terms!r}; only p2c|c2p is supported, as in DeBERTa-v3.")
    width = config.get("hidden_size", 1536)
    for key in ("pooler_hidden_size", "embedding_size"):
        if config.get(key, width) != width:
            problems.append(f"{key} is {config[key]}; only the hidden_size, {width}, is supported.")
    return problems


def distance_rows(config: Config) -> Any:
    """Return the row of the embeddings of distances for each distance from -f to f, int64 [2 f + 1].

    A distance is the position of the query minus that of the key. f is the largest one that the buckets
    distinguish: all larger ones have its row.
    """
    import torch
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    buckets, farthest = int(config.get("position_buckets", -1)), int(config.get("max_relative_positions", -1))
    farthest = farthest if farthest > 0 else int(config["max_position_embeddings"])
    distances = torch.arange(-farthest, farthest + 1)
    if buckets <= 0:
        return (distances + farthest).clamp(0, 2 * farthest - 1)
    rows = make_log_bucket_position(distances, buckets, farthest).long()
    return (rows + buckets).clamp(0, 2 * buckets - 1)


FAMILY = Family(
    name="deberta-v2",
    tasks=ENCODER_TASKS,
    learning_rate=PublishedLearningRate(2e-5, 768),  # card of microsoft/deberta-v3-base, MNLI: 2e-5, 2.5e-5
    layout_config={
        "relative_attention": True, "share_att_key": True, "position_biased_input": False,
        "norm_rel_ebd": "layer_norm", "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0,
        "position_buckets": 8,
    },
    width_keys=("pooler_hidden_size",),
    attention_fields={"relative_bias": "projected", "uses_attention_interface": False},
    distance_rows=distance_rows,
    tokenizer_files=TokenizerFiles(("spm.model",)),
    tokenizer_spec=TokenizerSpec(
        ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"),
        {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
        "[CLS] $A [SEP]",
        "[CLS] $A [SEP] $B:1 [SEP]:1",
        allowed_models=("unigram",),
        allowed_models_reason="DeBERTa's tokenizer is a unigram model: use unigram.",
    ),
    # its generator and discriminator of pretraining (ELECTRA's), positions that no v3 model adds
    unused_tensors=(POSITION_IDS_TENSORS, r"(.+\.)?embeddings\.position_embeddings\.weight"),
    other_head_tensors=(
        r"(lm|mask)_predictions\..+",
        r"cls\.predictions\..+",
        r"qa_outputs\..+",
        r"classifier\..+",
    ),
    unsupported_config=unsupported_config,
)  # fmt: skip
