"""Remove a part of a block, an attention or the feed-forward part: x + f(x) becomes x.

The part is replaced by a module that adds zero to the hidden states. Where norms come first, the norm that
only this part read is removed too; where they come after the sum, norm(x + f(x)) becomes norm(x). The parts
of a block are numbered: its attentions in order, then the feed-forward part. The remaining attentions are
renumbered for the cache of keys and values, so that it has an entry for each of them only. A relative
position bias that the attention owned for all is moved to the next block.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.core.messages import with_article
from smelt.models.families.family import Attention, Family, Stack
from smelt.models.families.model_blocks import SKIPPED_PARTS_ATTRIBUTE, skipped_parts
from smelt.models.families.registry import family_of


class SkippedSublayer(nn.Module):
    """Returns a zero [] of the type of its input; it has no parameters.

    results: number of outputs that a block expects: 1, or the 2 or 3 of an attention (the addend, the
    relative position bias that it was given where there are 3, and no weights). A zero without axes adds
    to states of any shape, and an exporter folds it: nothing of the part remains in a graph.
    """

    def __init__(self, results: int = 1) -> None:
        super().__init__()
        self.results = results

    def forward(self, hidden_states: Tensor, *unused: Any, **given: Any) -> Any:
        """Return the zero; for an attention a tuple that begins with it."""
        zero = hidden_states.new_zeros(())
        if self.results == 1:
            return zero
        return (zero, None) if self.results == 2 else (zero, given.get("position_bias"), None)

    def extra_repr(self) -> str:
        """Return the number of outputs, for printing."""
        return f"results={self.results}"


def skip_sublayer(model: Any, place: str, part: int) -> dict[str, Any]:
    """Remove a part from the block at `place` of `model`, in place; return the edit.

    A block that is used in several places loses it in all of them. Works on the meta device.

    Raises:
        InputError: it is the last of its kind in its stack.
        LookupError: there is no such block.
        ValueError: there is no such part, or it was already removed.
    """
    family, stack = _find_stack(model, place)
    block = model.get_submodule(place)
    gone = skipped_parts(block)
    if type(part) is not int or not 0 <= part <= len(stack.attentions) or part in gone:
        raise ValueError(f"the block {place} has no part {part!r} to remove")
    blocks = list(dict.fromkeys(model.get_submodule(stack.module_path)))
    if not any(part not in skipped_parts(other) for other in blocks if other is not block):
        raise InputError(
            f"{place}: {with_article(sublayer_name(stack, part))} of the {stack.name} must be kept,"
            " because it is the last one.",
            code="last-layer",
        )
    if part < len(stack.attentions):
        _move_relative_bias(family, stack, blocks, block, part)
    _remove(block, stack, part)
    setattr(block, SKIPPED_PARTS_ATTRIBUTE, gone | {part})
    renumber_caches(model, stack)
    return {"op": "skip", "module": place, "part": part}


def sublayer_name(stack: Stack, part: int) -> str:
    """Return the name of a part of the blocks of `stack` in settings: attention, cross-attention or ffn."""
    if part == len(stack.attentions):
        return "ffn"
    return "cross-attention" if stack.attentions[part].cross else "attention"


def renumber_caches(model: Any, stack: Stack) -> None:
    """Renumber the remaining attentions of each kind in `stack` from 0: their index in the cache."""
    blocks = list(dict.fromkeys(model.get_submodule(stack.module_path)))
    if not any(skipped_parts(block) for block in blocks):
        return
    for part, attention in enumerate(stack.attentions):
        left = [block for block in blocks if part not in skipped_parts(block)]
        for number, block in enumerate(left):
            for module in block.get_submodule(attention.name).modules():
                if getattr(module, "layer_idx", None) is not None:
                    module.layer_idx = number


def _find_stack(model: Any, place: str) -> tuple[Family, Stack]:
    family = family_of(model)
    for stack in family.stacks(model.config.to_dict()) if family else ():
        if family and place in {
            f"{stack.module_path}.{at}" for at in range(len(model.get_submodule(stack.module_path)))
        }:
            return family, stack
    raise LookupError(f"the model has no block {place}")


def _move_relative_bias(family: Family, stack: Stack, blocks: list[Any], block: Any, part: int) -> None:
    """Move the relative position bias to the next block if this attention owns that of its stack."""
    remaining = [other for other in blocks if part not in skipped_parts(other)]
    if family.relative_bias and not stack.attentions[part].cross and remaining[0] is block:
        family.relative_bias().move_table(block, remaining[1])


def _remove(block: Any, stack: Stack, part: int) -> None:
    if part < len(stack.attentions):
        gone: Any = stack.attentions[part]
        results = 3 if gone.relative_bias == "handed_on" else 2
    else:
        gone, results = stack.feed_forward, 1
    if gone.name:
        _set_submodule(block, gone.name, SkippedSublayer(results))
    for product in gone.linear_layers:
        if not (gone.name and product.startswith(f"{gone.name}.")):
            _set_submodule(block, product, SkippedSublayer())
    for norm in gone.qk_norms or () if isinstance(gone, Attention) else ():
        if not norm.startswith(f"{gone.name}."):
            _set_submodule(block, norm, nn.Identity())
    if stack.stream.pre_norm:
        _set_submodule(block, stack.stream.part_norms[part], nn.Identity())


def _set_submodule(block: Any, name: str, new: nn.Module) -> None:
    owner, _, last = name.rpartition(".")
    setattr(block.get_submodule(owner), last, new)
