"""The parts of layers, and the importance of each: its influence on hidden states, the loss without it.

A part adds f(x) to the states x, where f is an attention or a feed-forward part with the norm before it.
With norms after the sum, norm(x + f(x)), the norm is not part of f and is kept when f is removed.

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

from smelt.calibration.samples import model_outputs
from smelt.models.families.family import Attention, FeedForward
from smelt.models.families.model_blocks import Block, blocks_of, skipped_parts
from smelt.models.skip_sublayer import sublayer_name
from smelt.training.samples import TensorBatch


@dataclass(frozen=True)
class LayerPart:
    """A part of a block that is present.

    index: of the part in its block (see `skip_sublayer`). kind: its name in settings.
    """

    block: Block
    index: int
    kind: str

    @property
    def stack(self) -> str:
        """The name of the part's stack."""
        return self.block.stack.name

    @property
    def name(self) -> str:
        """The part's name in details: the block's index and the kind."""
        return f"{self.block.index} {self.kind}"

    @property
    def structure(self) -> Attention | FeedForward:
        """The names of the part's linear layers in the model."""
        stack = self.block.stack
        parts: tuple[Attention | FeedForward, ...] = (*stack.attentions, stack.feed_forward)
        return parts[self.index].with_prefix(self.block.module_path)

    @property
    def output_layer(self) -> str:
        """The dotted name of the part's last linear layer."""
        return self.structure.linear_layers[-1]

    @property
    def norm(self) -> str:
        """The dotted name of the part's norm."""
        return f"{self.block.module_path}.{self.block.stack.stream.part_norms[self.index]}"


# Called with a part, x and f(x), float [B, S, D]; returns a replacement of f(x), or None.
PartCallback = Callable[[LayerPart, Tensor, Tensor], Tensor | None]


def layer_parts(model: Any) -> list[LayerPart]:
    """Return the present parts of all blocks of `model` in order; a repeated block counts once."""
    return [
        LayerPart(block, number, sublayer_name(block.stack, number))
        for block in blocks_of(model)
        for number in range(len(block.stack.attentions) + 1)
        if number not in skipped_parts(block.module)
    ]


def part_influence(
    model: Any, parts: Sequence[LayerPart], batches: Iterable[TensorBatch]
) -> dict[LayerPart, float]:
    """Return 1 - mean over tokens of cos(x, x + f(x)) for each part.

    Source: He et al. 2024, What Matters in Transformers? Not All Attention is Needed, arXiv:2406.15786
    (their similarity, of attention and MLP layers with the norm and the residual that belong to them).

    Args:
        model: in eval mode.
        parts: the model's parts.
        batches: inputs without padding, on the device of the model.
    """
    sums: defaultdict[LayerPart, float] = defaultdict(float)
    tokens: Counter[LayerPart] = Counter()

    def see(part: LayerPart, x: Tensor, added: Tensor) -> None:
        cosines = cosine_similarity(x.double(), x.double() + added.double(), dim=-1)
        sums[part] += cosines.sum().item()
        tokens[part] += cosines.numel()

    with _part_hooks(model, parts, see):
        for _ in model_outputs(model, batches):
            pass
    return {part: 1 - sums[part] / max(1, tokens[part]) for part in parts}


@contextmanager
def without_parts(model: Any, parts: Sequence[LayerPart], removed: Collection[LayerPart]) -> Iterator[None]:
    """Disable `removed`, some of the `parts` of `model`, inside the context."""

    def see(part: LayerPart, x: Tensor, added: Tensor) -> Tensor | None:
        return added.new_zeros(()) if part in removed else None

    with _part_hooks(model, parts, see):
        yield


@contextmanager
def _part_hooks(model: Any, parts: Sequence[LayerPart], callback: PartCallback) -> Iterator[None]:
    """Call `callback` for each part whenever it computes; a returned tensor replaces the part's output.

    A linear layer may be shared by several blocks, but norms are not: so the part is identified by the norm,
    which computes right before the linear layer (pre-norm) or right after it (post-norm).
    """
    state: dict[str, Any] = {}

    def begin(part: LayerPart) -> Callable[..., None]:
        def hook(_: Any, given: tuple[Any, ...]) -> None:
            state["part"], state["x"] = part, given[0]

        return hook

    def end(_: Any, given: Any, result: Any) -> Any:
        if "part" not in state:
            return None
        instead = callback(state.pop("part"), state.pop("x"), result)
        return None if instead is None else instead.expand_as(result)

    def keep(_: Any, given: Any, result: Any) -> None:
        state["added"] = result

    def summed(part: LayerPart) -> Callable[..., Any]:
        def hook(_: Any, given: tuple[Any, ...]) -> Any:
            added = state.pop("added")
            x = given[0] - added
            instead = callback(part, x, added)
            return None if instead is None else (x + instead, *given[1:])

        return hook

    handles = []
    products = {model.get_submodule(part.output_layer): part.block.stack.stream.pre_norm for part in parts}
    for product, first in products.items():
        handles.append(product.register_forward_hook(end if first else keep))
    for part in parts:
        make = begin if part.block.stack.stream.pre_norm else summed
        handles.append(model.get_submodule(part.norm).register_forward_pre_hook(make(part)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
