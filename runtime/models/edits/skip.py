"""A part of a block goes, an attention or the feed-forward part: what stays of x + f(x) is x.

Where norms come first, the norm that only this part read goes too; where they come behind the sum, what stays
of norm(x + f(x)) is norm(x). The parts of a block are counted: its attentions in order, then the feed-forward
part. Attentions that stay are counted anew for the cache of keys and values, so that it has an entry for each
of them and none for what is gone. A bias by distance that the attention owned for all is handed on.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from smelt.core.errors import InputError
from smelt.core.text import article
from smelt.families.family import Attention, Family, Stack
from smelt.families.registry import family_of
from smelt.families.walk import SKIPPED, skipped_parts
from smelt.runtime.layers.skipped import Skipped


def skip(model: Any, place: str, part: int) -> dict[str, Any]:
    """Take a part out of the block at `place` of `model`, in place; return the edit that says so.

    A block that stands in several places loses it in all of them. Works on the meta device.

    Raises:
        InputError: it is the last of its kind in its stack.
        LookupError: there is no such block.
        ValueError: there is no such part, or it is gone already.
    """
    family, stack = _stack(model, place)
    block = model.get_submodule(place)
    gone = skipped_parts(block)
    if type(part) is not int or not 0 <= part <= len(stack.attentions) or part in gone:
        raise ValueError(f"the block {place} has no part {part!r} that could go")
    blocks = list(dict.fromkeys(model.get_submodule(stack.place)))
    if not any(part not in skipped_parts(other) for other in blocks if other is not block):
        raise InputError(
            f"{place}: {article(word_of(stack, part))} of the {stack.name} has to stay, and this is the"
            " last.",
            code="last-layer",
        )
    if part < len(stack.attentions):
        _hand_on(family, stack, blocks, block, part)
    _remove(block, stack, part)
    setattr(block, SKIPPED, gone | {part})
    number_caches(model, stack)
    return {"op": "skip", "module": place, "part": part}


def word_of(stack: Stack, part: int) -> str:
    """Return what settings call a part of the blocks of `stack`: attention, cross-attention or ffn."""
    if part == len(stack.attentions):
        return "ffn"
    return "cross-attention" if stack.attentions[part].cross else "attention"


def number_caches(model: Any, stack: Stack) -> None:
    """Number the attentions of each kind that are left in `stack`, from 0: their places in the cache."""
    blocks = list(dict.fromkeys(model.get_submodule(stack.place)))
    if not any(skipped_parts(block) for block in blocks):
        return
    for part, attention in enumerate(stack.attentions):
        left = [block for block in blocks if part not in skipped_parts(block)]
        for number, block in enumerate(left):
            for module in block.get_submodule(attention.name).modules():
                if getattr(module, "layer_idx", None) is not None:
                    module.layer_idx = number


def _stack(model: Any, place: str) -> tuple[Family, Stack]:
    family = family_of(model)
    for stack in family.stacks(model.config.to_dict()) if family else ():
        if family and place in {f"{stack.place}.{at}" for at in range(len(model.get_submodule(stack.place)))}:
            return family, stack
    raise LookupError(f"the model has no block {place}")


def _hand_on(family: Family, stack: Stack, blocks: list[Any], block: Any, part: int) -> None:
    """Let the next block own the bias by distance, where this attention owns that of its stack."""
    there = [other for other in blocks if part not in skipped_parts(other)]
    if family.relative_bias and not stack.attentions[part].cross and there[0] is block:
        family.relative_bias().hand_on(block, there[1])


def _remove(block: Any, stack: Stack, part: int) -> None:
    if part < len(stack.attentions):
        gone: Any = stack.attentions[part]
        results = 3 if gone.relative == "handed_on" else 2
    else:
        gone, results = stack.feed_forward, 1
    if gone.name:
        _put(block, gone.name, Skipped(results))
    for product in gone.products:
        if not (gone.name and product.startswith(f"{gone.name}.")):
            _put(block, product, Skipped())
    for norm in gone.norms or () if isinstance(gone, Attention) else ():
        if not norm.startswith(f"{gone.name}."):
            _put(block, norm, nn.Identity())
    if stack.stream.norms_first:
        _put(block, stack.stream.norms[part], nn.Identity())


def _put(block: Any, name: str, new: nn.Module) -> None:
    owner, _, last = name.rpartition(".")
    setattr(block.get_submodule(owner), last, new)
