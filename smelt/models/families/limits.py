"""What stages cannot change in the models of some families, with the reason."""

from __future__ import annotations

from smelt.core.messages import with_article
from smelt.models.families.layout import Config
from smelt.models.families.registry import find_family


def no_blocks_reason(config: Config) -> str | None:
    """Return the error text if a model of this config has no transformer blocks, else None.

    None for an unsupported family; callers report that themselves.
    """
    family = find_family(config)
    if family is None or family.stacks(config):
        return None
    if family.is_user_module:
        return "in a PyTorch module of your own, attention and feed-forward blocks are not known"
    return f"{with_article(family.name)} model has convolutions and no attention or feed-forward blocks"


def fixed_width_reason(config: Config) -> str | None:
    """Return why the hidden states of a model of this config cannot get other channels; None if they can.

    None for an unsupported family.
    """
    family = find_family(config)
    if family is None:
        return None
    if family.input_kind == "audio":
        return f"convolutions before the encoder of {with_article(family.name)} model are as wide"
    if any(stack.feed_forward.router is not None for stack in family.stacks(config)):
        return "the routers of a mixture of experts, which are not changed, read the hidden states"
    if family.head_input_vectors == 1:
        return None
    return (
        f"the head of {with_article(family.name)} model reads {family.head_input_vectors} vectors of its"
        " hidden states as one"
    )
