"""Tensors that checkpoints hold and their models do not read, so that nothing is lost without them.

They are what older versions of transformers, and the libraries before it, stored beside the weights: masks
and position numbers that are computed today, and heads and poolers of the training before. Each family says
which (smelt.families), as each model class of transformers lists some in
`_keys_to_ignore_on_load_unexpected`. Any other tensor that a model has no place for is an error: it would
be lost.
"""

from __future__ import annotations

import re

from smelt.families.registry import FAMILIES

_POOLER = r"(\w+\.)?pooler\.dense\.(weight|bias)"


def is_unread(family: str, name: str, new_head: bool = False, embeds: bool = False) -> bool:
    """Say whether a model of `family` (config's model_type) computes the same without the tensor `name`.

    Args:
        family: the config's model_type.
        name: as the checkpoint has it, also of one that was saved without its head.
        new_head: the model has another head than the checkpoint was trained with.
        embeds: it is a sentence embedder, which has no head and reads no pooler.
    """
    known = FAMILIES.get(family)
    patterns = () if known is None else known.unread + (known.other_heads if new_head or embeds else ())
    patterns += (_POOLER,) if embeds else ()
    return any(re.fullmatch(pattern, name) for pattern in patterns)
