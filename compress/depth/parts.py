"""The parts of layers, and what each does: how far it turns the hidden states, and what the loss is without.

A part adds to the states: f(x) to x, where f is an attention or a feed-forward part with the norm before it.
Where norms stand behind the sum, norm(x + f(x)), that norm is no part of f and stays when f goes.

Shapes: B = batch, S = tokens, D = width of the hidden states.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import cosine_similarity

from smelt.compress.calibration.rows import outputs
from smelt.compress.train.data import TensorBatch
from smelt.families.family import Attention, FeedForward
from smelt.families.walk import Block, blocks_of, skipped_parts
from smelt.runtime.models.edits.skip import word_of


@dataclass(frozen=True)
class Part:
    """A part of a block that is there.

    number: of the part in its block (see `skip`). kind: what settings call it.
    """

    block: Block
    number: int
    kind: str

    @property
    def stack(self) -> str:
        """The name of its stack."""
        return self.block.stack.name

    @property
    def name(self) -> str:
        """What it is called in details: the block's number and the kind."""
        return f"{self.block.number} {self.kind}"

    @property
    def named(self) -> Attention | FeedForward:
        """Its products, with the names that they have in the model."""
        stack = self.block.stack
        parts: tuple[Attention | FeedForward, ...] = (*stack.attentions, stack.feed_forward)
        return parts[self.number].under(self.block.place)

    @property
    def last(self) -> str:
        """The dotted name of its last product."""
        return self.named.products[-1]

    @property
    def norm(self) -> str:
        """The dotted name of the norm that belongs to it."""
        return f"{self.block.place}.{self.block.stack.stream.norms[self.number]}"


# Given a part, x and f(x), float [B, S, D], returns what is added instead, or None.
See = Callable[[Part, Tensor, Tensor], Tensor | None]


def parts_of(model: Any) -> list[Part]:
    """Return the parts of all blocks of `model` that are there, in order; a block in several places once."""
    return [
        Part(block, number, word_of(block.stack, number))
        for block in blocks_of(model)
        for number in range(len(block.stack.attentions) + 1)
        if number not in skipped_parts(block.module)
    ]


def part_influence(model: Any, parts: Sequence[Part], batches: Iterable[TensorBatch]) -> dict[Part, float]:
    """Return of each part 1 - mean over tokens of cos(x, x + f(x)).

    Source: He et al. 2024, What Matters in Transformers? Not All Attention is Needed, arXiv:2406.15786
    (their similarity, of attention and MLP layers with the norm and the residual that belong to them).

    Args:
        model: in eval mode.
        parts: of it.
        batches: inputs without padding, on the device of the model.
    """
    sums: defaultdict[Part, float] = defaultdict(float)
    tokens: Counter[Part] = Counter()

    def see(part: Part, x: Tensor, added: Tensor) -> None:
        cosines = cosine_similarity(x.double(), x.double() + added.double(), dim=-1)
        sums[part] += cosines.sum().item()
        tokens[part] += cosines.numel()

    with _watched(model, parts, see):
        for _ in outputs(model, batches):
            pass
    return {part: 1 - sums[part] / max(1, tokens[part]) for part in parts}


@contextmanager
def without_parts(model: Any, parts: Sequence[Part], gone: Collection[Part]) -> Iterator[None]:
    """Let `model` compute meanwhile as if `gone`, some of its `parts`, were not there."""

    def see(part: Part, x: Tensor, added: Tensor) -> Tensor | None:
        return added.new_zeros(()) if part in gone else None

    with _watched(model, parts, see):
        yield


@contextmanager
def _watched(model: Any, parts: Sequence[Part], see: See) -> Iterator[None]:
    """Call `see` for each part whenever it computes; what it returns is added instead.

    A product may stand in several blocks, and their norms do not: so the norm says which part it is, which
    computes right before the product (pre-norm) or right behind it (post-norm).
    """
    state: dict[str, Any] = {}

    def begin(part: Part) -> Callable[..., None]:
        def hook(_: Any, given: tuple[Any, ...]) -> None:
            state["part"], state["x"] = part, given[0]

        return hook

    def end(_: Any, given: Any, result: Any) -> Any:
        if "part" not in state:
            return None
        instead = see(state.pop("part"), state.pop("x"), result)
        return None if instead is None else instead.expand_as(result)

    def keep(_: Any, given: Any, result: Any) -> None:
        state["added"] = result

    def summed(part: Part) -> Callable[..., Any]:
        def hook(_: Any, given: tuple[Any, ...]) -> Any:
            added = state.pop("added")
            x = given[0] - added
            instead = see(part, x, added)
            return None if instead is None else (x + instead, *given[1:])

        return hook

    handles = []
    products = {model.get_submodule(part.last): part.block.stack.stream.norms_first for part in parts}
    for product, first in products.items():
        handles.append(product.register_forward_hook(end if first else keep))
    for part in parts:
        make = begin if part.block.stack.stream.norms_first else summed
        handles.append(model.get_submodule(part.norm).register_forward_pre_hook(make(part)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
