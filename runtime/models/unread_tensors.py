"""Tensors that checkpoints hold and their models do not read, so that nothing is lost without them.

They are what older versions of transformers, and the libraries before it, stored beside the weights: masks
and position numbers that are computed today, and heads and poolers of the training before. By family, as
each model class of transformers lists some in `_keys_to_ignore_on_load_unexpected`. Any other tensor that a
model has no place for is an error: it would be lost.
"""

from __future__ import annotations

import re

# Numbers 0, 1, 2 ... that BERT and its relatives stored before transformers 4.31.
_POSITION_IDS = r"(.+\.)?embeddings\.position_ids"
# Angles of rotary positions, stored with each layer before transformers 4.32.
_INV_FREQ = r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
# The version of fairseq's format.
_VERSION = r"(model\.)?(en|de)coder\.version"

_UNREAD: dict[str, tuple[str, ...]] = {
    "bert": (_POSITION_IDS,),
    "distilbert": (_POSITION_IDS,),
    # no layer of the classifier reads the pooler of the encoder
    "roberta": (_POSITION_IDS, r"(roberta\.)?pooler\.dense\.(weight|bias)"),
    # the causal mask of each layer, and the number that stood for minus infinity
    "gpt2": (r"(transformer\.)?h\.\d+\.(attn|crossattention)\.(bias|masked_bias)",),
    "llama": (_INV_FREQ,),
    "qwen2": (_INV_FREQ,),
    # a bias that the first release trained with and that no code ever read
    "t5": (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    "bart": (_VERSION,),
    "mbart": (_VERSION,),
}
# What a checkpoint was trained with before, where it becomes a classifier with a head of its own.
_HEADS: dict[str, tuple[str, ...]] = {
    "bert": (r"cls\..+", r"qa_outputs\..+"),
    "distilbert": (r"vocab_(transform|layer_norm|projector)\..+", r"qa_outputs\..+"),
    "roberta": (r"lm_head\..+", r"qa_outputs\..+"),
}


def is_unread(family: str, name: str, new_head: bool = False) -> bool:
    """Say whether a model of `family` (config's model_type) computes the same without the tensor `name`.

    Args:
        family: the config's model_type.
        name: as the checkpoint has it, also of one that was saved without its head.
        new_head: the model gets another head than the checkpoint was trained with.
    """
    known = _UNREAD.get(family, ()) + (_HEADS.get(family, ()) if new_head else ())
    return any(re.fullmatch(pattern, name) for pattern in known)
