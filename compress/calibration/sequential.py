"""Run a model block by block, with the states after the current block stored for all batches.

The model itself calls its blocks: those before the current one are replaced by the stored states, and masks,
rotary positions, windows and biases are computed by the model's own code, so nothing here depends on a
family.

Shapes: B = batch, S = tokens of a sequence, D = width of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from smelt.compress.calibration.input_hooks import InputCallback, LayersByKey, input_hooks
from smelt.compress.calibration.state_cache import BlockOutput, BlockStateCache
from smelt.compress.train.encoded_samples import TensorBatch
from smelt.families.family import Stack
from smelt.families.model_blocks import Block

# Beyond this the states of all samples are stored on disk.
STATES_MEMORY_BYTES = 2**30


class SequentialRunner:
    """A model that is run block by block.

    states: by batch, output of the last position that has run. encoded: by batch, output of the encoder.
    """

    def __init__(self, model: Any, batches: Sequence[TensorBatch], folder: Path, limit_bytes: int) -> None:
        self.model, self.batches = model, batches
        self.states = BlockStateCache(folder / "states", limit_bytes)
        self.encoded: BlockStateCache | None = None
        self._encoded = BlockStateCache(folder / "encoded", limit_bytes)
        self._stack: Stack | None = None
        self._done = 0  # positions of the stack that have run

    def run_before(self, block: Block) -> None:
        """Run the blocks before `block` that have not run yet."""
        self.run_before_index(block.stack, block.index)

    def run_before_index(self, stack: Stack, number: int) -> None:
        """Run the blocks before position `number` of `stack` that have not run yet."""
        if self._stack is not None and self._stack.name != stack.name:
            self._run_to(len(self._stack_modules(self._stack)))
            with torch.inference_mode():
                for batch in range(len(self.batches)):
                    self._encoded.put(batch, self._encoder_states(batch))
            self.encoded, self._stack = self._encoded, None
        if self._stack is None:
            self._stack, self._done = stack, 0
        self._run_to(number)

    def is_past(self, stack: Stack, number: int) -> bool:
        """Return whether position `number` of `stack` has already run."""
        if self._stack is None or self._stack.name != stack.name:
            return self.encoded is not None
        return self._done > number

    @contextmanager
    def resume_batch(self, number: int) -> Iterator[None]:
        """Resume the model from the stored states of batch `number` inside the context."""
        with ExitStack() as stack:
            if self.encoded is not None:
                states = self.encoded.get(number, str(self.model.device))
                encoder = self.model.get_encoder()
                stack.callback(forward_restorer(encoder))
                encoder.forward = lambda *_, **__: BaseModelOutput(last_hidden_state=states)
            if self._stack is not None:
                stack.enter_context(self._replay_states(number, None))
            yield

    def run_block(self, block: Block) -> None:
        """Run `block` and store its outputs instead of its inputs."""
        self._run_to(block.index + 1)

    def observe(self, block: Block, layers: LayersByKey, see: InputCallback) -> None:
        """Run `block` and later blocks that use some of `layers`; call `see` with the inputs of these."""
        wanted = {module for found in layers.values() for module in found}
        places = self._stack_modules(block.stack)
        last = max(at for at, m in enumerate(places) if at == block.index or _contains_any(m, wanted))
        batch: TensorBatch = {}
        with input_hooks(self.model, layers, see, batch), torch.inference_mode():
            for number, inputs in enumerate(self.batches):
                batch.clear()
                batch.update(inputs)
                self._run(number, last)

    def observe_after_blocks(self, layers: LayersByKey, see: InputCallback) -> None:
        """Run the model after its blocks on their outputs; call `see` with the inputs of `layers` there."""
        self._run_to(len(self._stack_modules(self._current_stack)))
        batch: TensorBatch = {}
        with input_hooks(self.model, layers, see, batch), torch.inference_mode():
            for number, inputs in enumerate(self.batches):
                batch.clear()
                batch.update(inputs)
                with self._replay_states(number, None):
                    self.model(**self._inputs(number))

    def _run_to(self, end: int) -> None:
        """Run the positions before `end` that have not run yet."""
        if end > self._done:
            with torch.inference_mode():
                for number in range(len(self.batches)):
                    self.states.put(number, self._run(number, end - 1))
            self._done = end

    def _stack_modules(self, stack: Stack) -> list[nn.Module]:
        return list(self.model.get_submodule(stack.module_path))

    def _run(self, number: int, last: int) -> BlockOutput:
        """Return the output of position `last` for a batch, from the stored states."""
        try:
            with self._replay_states(number, last):
                self.model(**self._inputs(number))
        except _StopForward as reached:
            return reached.result
        raise RuntimeError(
            f"the model never called block {last} of {len(self._stack_modules(self._current_stack))}"
        )

    def _encoder_states(self, number: int) -> BlockOutput:
        """Return the encoder's output from the output of its last block, float [B, S, D]."""
        inputs = self.batches[number]
        with self._replay_states(number, None):
            found: BlockOutput = self.model.get_encoder()(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
            ).last_hidden_state
        return found

    def _inputs(self, number: int) -> dict[str, Any]:
        inputs: dict[str, Any] = {k: v for k, v in self.batches[number].items() if k != "labels"}
        if self.encoded is not None:
            del inputs["input_ids"]
            states = self.encoded.get(number, str(self.model.device))
            inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=states)
        return inputs | ({"use_cache": False} if self.model.can_generate() else {})

    @property
    def _current_stack(self) -> Stack:
        assert self._stack is not None
        return self._stack

    @contextmanager
    def _replay_states(self, number: int, last: int | None) -> Iterator[None]:
        """Replace positions that have run by the stored states; stop the forward pass after `last`."""
        places = self._stack_modules(self._current_stack)
        kept = self.states.get(number, str(self.model.device)) if self._done else None
        calls = 0

        def stand_in(forward: Callable[..., BlockOutput]) -> Callable[..., BlockOutput]:
            def call(*args: Any, **kwargs: Any) -> BlockOutput:
                nonlocal calls
                at, calls = calls, calls + 1
                if at < self._done:
                    assert kept is not None
                    return kept
                result = forward(*args, **kwargs)
                if at == last:
                    raise _StopForward(result)
                return result

            return call

        modules: list[Any] = list(dict.fromkeys(places))
        with ExitStack() as stack:
            for module in modules:
                stack.callback(forward_restorer(module))
                module.forward = stand_in(module.forward)
            yield


class _StopForward(Exception):  # noqa: N818 - no error: it ends a forward pass after the requested block
    def __init__(self, result: BlockOutput) -> None:
        super().__init__()
        self.result = result


def _contains_any(module: nn.Module, wanted: set[nn.Module]) -> bool:
    return not wanted.isdisjoint(module.modules())


def forward_restorer(module: Any) -> Callable[[], None]:
    """Return a function that restores the present forward of `module`, its own or that of its class."""
    own = vars(module).get("forward")

    def restore() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    return restore
