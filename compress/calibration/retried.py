"""A model that is run on the same batches again and again, each time with something else changed in it.

What stands before the change gives the same states each time: it is run once, and the model goes on from
there (see `walk.py`), with the very numbers that it would have otherwise.

    tried = Retried(model, batches, folder)
    for ...:
        tried.start_at(stack, number)  # the model as it is, where nothing is changed
        ...  # change something in this place of the stack, or behind it
        tried.outputs()

Shapes: B = batch, V = outputs of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smelt.compress.calibration.rows import outputs
from smelt.compress.calibration.walk import MEMORY_BYTES, Walk
from smelt.compress.train.data import TensorBatch
from smelt.families.registry import family_of

# Makes of a model and a batch what is wanted of it, such as a loss.
Called = Callable[[Any, Mapping[str, Tensor]], Any]


class Retried:
    """See the module.

    Args:
        model: in eval mode, where `batches` are.
        batches: what it reads.
        folder: of the states that take more than `limit_bytes`.
        limit_bytes: memory for the states between two blocks.
    """

    def __init__(
        self, model: Any, batches: Sequence[TensorBatch], folder: Path, limit_bytes: int = MEMORY_BYTES
    ) -> None:
        self.model, self.batches = model, batches
        self._folder, self._limit = folder, limit_bytes
        self._walk: Walk | None = None
        family = family_of(model)
        self._stacks = () if family is None else family.stacks(model.config.to_dict())

    def start_at(self, stack: str, number: int) -> None:
        """Run what stands before the place `number` of a stack, so that the model goes on from there.

        Where the model has no such stack, or repeats blocks, it starts from its beginning.
        """
        found = next((one for one in self._stacks if one.name == stack), None)
        if found is None or self._repeats:
            return self.start_over()
        if self._walk is None or self._walk.is_past(found, number):
            self._walk = Walk(self.model, self.batches, self._folder, self._limit)
            self._walk.reach_place(self._stacks[0], 0)
        self._walk.reach_place(found, number)

    def start_over(self) -> None:
        """Forget what was run: something in it changes, or it is changed for good."""
        self._walk = None

    @property
    def _repeats(self) -> bool:
        places = [list(self.model.get_submodule(stack.place)) for stack in self._stacks]
        return any(len(set(modules)) < len(modules) for modules in places)

    def outputs(self) -> Iterator[Tensor]:
        """Yield what the model makes of each batch: logits or vectors, float [B, V] or [B, S, V]."""
        call = self.calling(lambda model, batch: next(outputs(model, [batch])))
        return (call(self.model, batch) for batch in self.batches)

    def calling(self, called: Called) -> Called:
        """Return `called`, which is to be asked for the batches one by one in their order, from there on."""
        numbers, walk = cycle(range(len(self.batches))), self._walk

        @torch.inference_mode()
        def resumed(model: Any, batch: Mapping[str, Tensor]) -> Any:
            if walk is None:
                return called(model, batch)
            with walk.resumed(next(numbers)):
                return called(model, batch)

        return resumed
