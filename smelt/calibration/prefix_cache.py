"""Run a model again and again, each time with another change in it, from the states before the change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smelt.calibration.block_states import BlockOutput, repeat_batch
from smelt.calibration.samples import model_outputs
from smelt.calibration.sequential import STATES_MEMORY_BYTES, SequentialRunner
from smelt.models.families.registry import family_of
from smelt.tasks.samples import TensorBatch

# Computes a result from a model and a batch, such as a loss.
BatchFunction = Callable[[Any, Mapping[str, Tensor]], Any]
# Changes the model inside its context.
Change = Callable[[], AbstractContextManager[None]]

# Tokens of all changes that later blocks compute at once: fewer would wait for the weights to be read.
_STACKED_TOKENS = 1024


class PrefixCachedModel:
    """Runs a model on the same batches again and again, each time with another change in it.

    The blocks before the change give the same states each time: they run once, and the model resumes from
    their cached states, with identical results.

        cached = PrefixCachedModel(model, batches, folder)
        for ...:
            cached.start_at(stack, number)  # the unchanged model
            ...  # change something at this position of the stack, or after it
            cached.outputs()

    Args:
        model: in eval mode, on the device of `batches`.
        batches: inputs of the model.
        folder: for states beyond `limit_bytes`.
        limit_bytes: memory for the states between two blocks.
    """

    def __init__(
        self, model: Any, batches: Sequence[TensorBatch], folder: Path, limit_bytes: int = STATES_MEMORY_BYTES
    ) -> None:
        self.model, self.batches = model, batches
        self._folder, self._limit = folder, limit_bytes
        self._walk: SequentialRunner | None = None
        family = family_of(model)
        self._stacks = () if family is None else family.stacks(model.config.to_dict())

    def start_at(self, stack: str, number: int) -> None:
        """Run the blocks before position `number` of a stack, so that the model resumes from there.

        If the model has no such stack, or repeats blocks, it starts from the beginning.
        """
        stack_info = next((candidate for candidate in self._stacks if candidate.name == stack), None)
        if stack_info is None or self._shares_blocks:
            return self.reset()
        if self._walk is None or self._walk.is_past(stack_info, number):
            self._walk = SequentialRunner(self.model, self.batches, self._folder, self._limit)
            self._walk.run_before_index(self._stacks[0], 0)
        self._walk.run_before_index(stack_info, number)

    def reset(self) -> None:
        """Clear the cached states: call it when the model changes before the cached position."""
        self._walk = None

    @property
    def _shares_blocks(self) -> bool:
        modules_by_stack = [stack.modules(self.model) for stack in self._stacks]
        return any(len(set(modules)) < len(modules) for modules in modules_by_stack)

    def outputs(self) -> Iterator[Tensor]:
        """Yield the model's outputs for each batch: logits or embeddings, float [B, V] or [B, S, V]."""
        call = self.resume_each(lambda model, batch: next(model_outputs(model, [batch])))
        return (call(self.model, batch) for batch in self.batches)

    def resume_each(self, called: BatchFunction) -> BatchFunction:
        """Return `called` resuming from the cached states; call it on the batches in their order."""
        numbers, runner = cycle(range(len(self.batches))), self._walk

        @torch.inference_mode()
        def resumed(model: Any, batch: Mapping[str, Tensor]) -> Any:
            if runner is None:
                return called(model, batch)
            with runner.resume_batch(next(numbers)):
                return called(model, batch)

        return resumed

    def outputs_of_changes(
        self, changes: Sequence[Change], compare: Callable[[int, Tensor], float]
    ) -> Iterator[float]:
        """Yield for each change the sum over all batches of `compare(number of the batch, outputs)`.

        After `start_at`, only its block may change. Each change runs this block alone; later blocks compute
        several changes at once, as one batch, with the same results but for the rounding of sums.
        """
        if self._walk is None:
            for change in changes:
                with change():
                    yield sum((compare(i, out) for i, out in enumerate(self.outputs())), 0.0)
            return
        pending: list[list[BlockOutput]] = []  # by change, then batch
        for change in changes:
            with change():
                pending.append([self._walk.next_output(number) for number in range(len(self.batches))])
            if (len(pending) + 1) * max(map(_num_tokens, pending[0])) > _STACKED_TOKENS:
                yield from self._compare_pending(pending, compare)
                pending.clear()
        if pending:
            yield from self._compare_pending(pending, compare)

    def _compare_pending(
        self, pending: Sequence[Sequence[BlockOutput]], compare: Callable[[int, Tensor], float]
    ) -> list[float]:
        """Run the model after the changed block; return the sums of `compare` by change."""
        assert self._walk is not None
        sums = [0.0] * len(pending)
        for number, batch in enumerate(self.batches):
            with self._walk.resume_batch(number, [outputs[number] for outputs in pending]):
                stacked = next(model_outputs(self.model, [repeat_batch(batch, len(pending))]))
            for index, output in enumerate(stacked.chunk(len(pending))):
                sums[index] += compare(number, output)
        return sums


def _num_tokens(output: BlockOutput) -> int:
    """Return the number of tokens, of all samples, in the hidden states that a block returns."""
    states = output if isinstance(output, Tensor) else output[0]
    return int(states.shape[:-1].numel())
