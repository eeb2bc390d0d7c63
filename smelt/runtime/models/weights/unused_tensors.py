"""Tensors of checkpoints that their models do not use.

They were stored by older versions of transformers, and the libraries before it: masks
and position numbers that are computed today, and heads and poolers of the pretraining. Each family lists
them (smelt.families), as each model class of transformers lists some in
`_keys_to_ignore_on_load_unexpected`. Any other tensor without a parameter in the model is an error: it would
be lost.
"""

from __future__ import annotations

import re

from smelt.families.registry import FAMILIES

_POOLER = r"(\w+\.)?pooler\.dense\.(weight|bias)"


def is_unused_tensor(family: str, name: str, new_head: bool = False, embeds: bool = False) -> bool:
    """Return whether a model of `family` (config's model_type) does not use the tensor `name`.

    Args:
        family: the config's model_type.
        name: as in the checkpoint, also of one that was saved without its head.
        new_head: the model has another head than the checkpoint was trained with.
        embeds: it is a sentence embedder, which has no head and uses no pooler.
    """
    known = FAMILIES.get(family)
    patterns = (
        ()
        if known is None
        else known.unused_tensors + (known.other_head_tensors if new_head or embeds else ())
    )
    patterns += (_POOLER,) if embeds else ()
    return any(re.fullmatch(pattern, name) for pattern in patterns)
