"""Run a model block by block: change each block in turn, or resume from cached states before a change.

Later blocks are calibrated on the outputs of the changed blocks before them, and only the states between two
blocks are stored, for all samples (as in SparseGPT, GPTQ and Wanda). The encoder comes first; then the
decoder, on the states of the changed encoder.

    for step in run_blocks(model, rows, ctx):
        step.observe({"fc1": [step.module.fc1]}, see)  # on the unchanged block
        ...  # change step.module in place

The model itself calls its blocks: those before the current one are replaced by the stored states, and masks,
rotary positions, windows and biases are computed by the model's own code, so nothing here depends on a
family. States are kept in memory up to a limit and on disk beyond.

Shapes: B = batch, S = tokens of a sequence, D = width of the model, V = outputs of a model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.modeling_outputs import BaseModelOutput

from smelt.calibration.block_states import BlockOutput, BlockStateCache, stack_outputs
from smelt.calibration.samples import (
    CalibrationSamples,
    InputCallback,
    LayersByKey,
    input_hooks,
    observe_inputs,
    token_rows,
)
from smelt.calibration.statistics import (
    InputStatistics,
    collect_statistics,
)
from smelt.models.families.layout import Stack
from smelt.models.families.registry import Block, encoder_inputs
from smelt.stage import Context
from smelt.tasks.samples import TensorBatch

# Called with the hidden states before a block, float [B, S, D], and its output.
StatesCallback: TypeAlias = Callable[[Tensor, BlockOutput], None]


# Beyond this the states of all samples are stored on disk.
STATES_MEMORY_BYTES = 2**30


class SequentialRunner:
    """A model that is run block by block.

    batches: the last `num_held_back` are observed only on request. states: by batch, output of the last
    position that has run. encoded: by batch, output of the encoder.
    """

    def __init__(
        self,
        model: Any,
        batches: Sequence[TensorBatch],
        folder: Path,
        limit_bytes: int,
        num_held_back: int = 0,
    ) -> None:
        self.model, self.batches = model, batches
        self._num_calibration = len(batches) - num_held_back
        self.states = BlockStateCache(folder / "states", limit_bytes)
        self.encoded: BlockStateCache | None = None
        self._encoded = BlockStateCache(folder / "encoded", limit_bytes)
        self._stack: Stack | None = None
        self._finished: set[str] = set()  # stacks before it
        self._towers: list[tuple[Stack, BlockStateCache]] = []  # those that it does not read, and outputs
        self._folder, self._limit_bytes = folder, limit_bytes
        self._done = 0  # positions of the stack that have run

    def run_before(self, block: Block) -> None:
        """Run the blocks before `block` that have not run yet."""
        self.run_before_index(block.stack, block.index)

    def run_before_index(self, stack: Stack, number: int) -> None:
        """Run the blocks before position `number` of `stack` that have not run yet."""
        if self._stack is not None and self._stack.name != stack.name:
            self._run_to(len(self._stack_modules(self._stack)))
            if self.model.config.is_encoder_decoder:
                with torch.no_grad():
                    for batch in range(len(self.batches)):
                        self._encoded.put(batch, self._encoder_states(batch))
                self.encoded = self._encoded
            else:  # of another tower: its blocks return their last output from now on
                self._towers.append((self._stack, self.states))
                self.states = BlockStateCache(self._folder / f"states-{stack.name}", self._limit_bytes)
            self._finished.add(self._stack.name)
            self._stack = None
        if self._stack is None:
            self._stack, self._done = stack, 0
        self._run_to(number)

    def is_past(self, stack: Stack, number: int) -> bool:
        """Return whether position `number` of `stack` has already run."""
        if self._stack is None or self._stack.name != stack.name:
            return stack.name in self._finished
        return self._done > number

    @contextmanager
    def resume_batch(self, number: int, outputs: Sequence[BlockOutput] = ()) -> Iterator[None]:
        """Resume the model from the stored states of batch `number` inside the context.

        outputs: of the next position, which is then not run: one for each copy of the batch in the inputs
            (see `repeat_batch`).
        """
        copies = max(1, len(outputs))
        with ExitStack() as stack:
            if self.encoded is not None:
                states: Any = self.encoded.get(number, str(self.model.device))
                states = states.repeat(copies, *[1] * (states.dim() - 1))
                encoder = self.model.get_encoder()
                stack.callback(forward_restorer(encoder))
                encoder.forward = lambda *_, **__: BaseModelOutput(last_hidden_state=states)
            if outputs:
                rows = len(next(iter(self.batches[number].values())))
                stacked = self._done + 1, stack_outputs(outputs, rows)
                stack.enter_context(self._replay_states(number, None, stacked))
            elif self._stack is not None:
                stack.enter_context(self._replay_states(number, None))
            yield

    def next_output(self, number: int) -> BlockOutput:
        """Return the output of the next position for a batch, without storing it."""
        with torch.inference_mode():
            return self._run(number, self._done)

    def run_block(self, block: Block, see: StatesCallback | None = None) -> None:
        """Run `block` and store its outputs instead of its inputs; call `see` with both."""
        self._run_to(block.index + 1, see)

    def run_batch(self, number: int, position: int, see: StatesCallback | None = None) -> None:
        """Run `position` of the current stack for batch `number` only, and store its output.

        The blocks before it must have run. Once it has run for all batches, call `finish_position`.
        """
        with torch.no_grad():  # no inference mode: gradients may start from these states
            self.states.put(number, self._run(number, position, see))

    def finish_position(self, position: int) -> None:
        """Continue after `position` of the current stack, which `run_batch` ran for all batches."""
        self._done = position + 1

    def observe(self, block: Block, layers: LayersByKey, see: InputCallback, held_back: bool = False) -> None:
        """Run `block` and later blocks that use some of `layers`; call `see` with the inputs of these."""
        last = self._last_use(block, layers)
        batch: TensorBatch = {}
        with input_hooks(self.model, layers, see, batch), torch.inference_mode():
            for number in self.batch_numbers(held_back):
                batch.clear()
                batch.update(self.batches[number])
                self._run(number, last)

    def layer_inputs(self, number: int, block: Block, layers: LayersByKey) -> list[tuple[str, Tensor]]:
        """Return what `observe` would call back with for batch `number`."""
        inputs: list[tuple[str, Tensor]] = []

        def see(key: str, x: Tensor) -> None:
            inputs.append((key, x.clone()))

        with input_hooks(self.model, layers, see, self.batches[number]), torch.inference_mode():
            self._run(number, self._last_use(block, layers))
        return inputs

    def _last_use(self, block: Block, layers: LayersByKey) -> int:
        """Return the last position that uses some of `layers`, or that of `block`."""
        observed = {module for layer_modules in layers.values() for module in layer_modules}
        return max(
            index
            for index, module in enumerate(self._stack_modules(block.stack))
            if index == block.index or not observed.isdisjoint(module.modules())
        )

    def tokens_after(self, number: int, block: Block, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the outputs of `block` for the tokens of batch `number`, float [tokens, D].

        weights: by name, in place of the model's; gradients are passed to them.
        """
        return self._tokens(number, self._run(number, block.index, weights=weights))

    def stored_tokens(self, number: int) -> Tensor:
        """Return the output of the last block that has run, for the tokens of batch `number`."""
        return self._tokens(number, self.states.get(number, str(self.model.device)))

    def _tokens(self, number: int, output: BlockOutput) -> Tensor:
        states = output if isinstance(output, Tensor) else output[0]
        return token_rows(states, self.batches[number], source=self.encoded is None)

    def batch_numbers(self, held_back: bool) -> range:
        """Return the numbers of the batches for calibration, or of those that are held back."""
        if held_back:
            return range(self._num_calibration, len(self.batches))
        return range(self._num_calibration)

    def observe_after_blocks(self, layers: LayersByKey, see: InputCallback, held_back: bool = False) -> None:
        """Run the model after its blocks on their outputs; call `see` with the inputs of `layers` there.

        It is stopped when all of them were called: the output layer itself need not run, nor be loaded.
        """
        self._run_to(len(self._stack_modules(self._current_stack)))
        batch: TensorBatch = {}
        left = 0

        def see_all(key: str, x: Tensor) -> None:
            nonlocal left
            see(key, x)
            left -= 1
            if not left:
                raise _StopForward(x, x)

        with input_hooks(self.model, layers, see_all, batch), torch.inference_mode():
            for number in self.batch_numbers(held_back):
                batch.clear()
                batch.update(self.batches[number])
                left = sum(map(len, layers.values()))
                with self._replay_states(number, None), suppress(_StopForward):
                    self.model(**self._inputs(number))

    def _run_to(self, end: int, see: StatesCallback | None = None) -> None:
        """Run the positions before `end` that have not run yet; `see` gets the states around the last."""
        if end > self._done:
            for number in range(len(self.batches)):
                self.run_batch(number, end - 1, see)
            self.finish_position(end - 1)

    def _stack_modules(self, stack: Stack) -> list[nn.Module]:
        return stack.modules(self.model)

    def _run(
        self,
        number: int,
        last: int,
        see: StatesCallback | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> BlockOutput:
        """Return the output of position `last` for a batch, from the stored states."""
        try:
            with self._replay_states(number, last):
                if weights is None:
                    self.model(**self._inputs(number))
                else:
                    functional_call(self.model, dict(weights), (), self._inputs(number))
        except _StopForward as stopped:
            if see is not None:
                see(stopped.states, stopped.result)
            return stopped.result
        raise RuntimeError(
            f"the model never called block {last} of {len(self._stack_modules(self._current_stack))}"
        )

    def _encoder_states(self, number: int) -> BlockOutput:
        """Return the encoder's output from the output of its last block, float [B, S, D]."""
        inputs = self.batches[number]
        with self._replay_states(number, None):
            output: BlockOutput = self.model.get_encoder()(**encoder_inputs(inputs)).last_hidden_state
        return output

    def _inputs(self, number: int) -> dict[str, Any]:
        inputs: dict[str, Any] = {k: v for k, v in self.batches[number].items() if k != "labels"}
        if self.encoded is not None:
            del inputs[self.model.main_input_name]
            states = self.encoded.get(number, str(self.model.device))
            inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=states)
        return inputs | ({"use_cache": False} if self.model.can_generate() else {})

    @property
    def _current_stack(self) -> Stack:
        assert self._stack is not None
        return self._stack

    @contextmanager
    def _replay_states(
        self, number: int, last: int | None, replayed: tuple[int, BlockOutput] | None = None
    ) -> Iterator[None]:
        """Replace positions that have run by the stored states; stop the forward pass after `last`.

        replayed: the number of positions to replace, and the output of the last of them, instead.
        """
        stack_modules = self._stack_modules(self._current_stack)
        done, cached_state = replayed or (
            self._done,
            self.states.get(number, str(self.model.device)) if self._done else None,
        )
        calls = 0

        def stand_in(forward: Callable[..., BlockOutput]) -> Callable[..., BlockOutput]:
            def call(*args: Any, **kwargs: Any) -> BlockOutput:
                nonlocal calls
                index, calls = calls, calls + 1
                if index < done:
                    assert cached_state is not None
                    return cached_state
                result = forward(*args, **kwargs)
                if index == last:
                    raise _StopForward(args[0], result)
                return result

            return call

        modules: list[Any] = list(dict.fromkeys(stack_modules))
        with ExitStack() as stack:
            for tower, tower_states in self._towers:
                output = tower_states.get(number, str(self.model.device))
                for finished_module in self._stack_modules(tower):
                    stack.callback(forward_restorer(finished_module))
                    finished_module.forward = partial(_return_output, output)
            for module in modules:
                stack.callback(forward_restorer(module))
                module.forward = stand_in(module.forward)
            yield


def _return_output(output: BlockOutput, *args: Any, **kwargs: Any) -> BlockOutput:
    """Replace the forward of a block."""
    return output


class _StopForward(Exception):  # noqa: N818 - no error: it ends a forward pass after the requested block
    def __init__(self, states: Tensor, result: BlockOutput) -> None:
        super().__init__()
        self.states, self.result = states, result


def forward_restorer(module: Any) -> Callable[[], None]:
    """Return a function that restores the present forward of `module`, its own or that of its class."""
    own_forward = vars(module).get("forward")

    def restore() -> None:
        if own_forward is None:
            del module.forward
        else:
            module.forward = own_forward

    return restore


class ModelPart:
    """A part of a model that is calibrated at once: here the whole model, which is in memory."""

    def __init__(self, model: Any, samples: CalibrationSamples, ctx: Context) -> None:
        self.model, self.samples, self.ctx = model, samples, ctx

    def observe(self, layers: LayersByKey, see: InputCallback, *, held_back: bool = False) -> None:
        """Run the part on the CPU and call `see(key, x)` with the inputs of `layers`.

        On the calibration samples, or those that are held back.
        """
        samples = self.samples.held_back if held_back else self.samples
        if samples is not None:
            observe_inputs(self.model, samples, layers, see, self.ctx)

    def collect(
        self, layers: LayersByKey, second: bool = True
    ) -> AbstractContextManager[dict[str, InputStatistics]]:
        """Return a context with the statistics of the inputs of `layers` (see `collect_statistics`)."""
        return collect_statistics(self.model, self.samples, layers, self.ctx, second=second)

    def run(self) -> None:
        """Run the part as it is now, for the inputs of the next one; later changes do not affect these."""


class PartAfterBlocks(ModelPart):
    """The layers after all blocks, such as the output layer; no block runs for them."""

    def __init__(
        self, model: Any, samples: CalibrationSamples, ctx: Context, runner: SequentialRunner
    ) -> None:
        super().__init__(model, samples, ctx)
        self._runner = runner

    def observe(self, layers: LayersByKey, see: InputCallback, *, held_back: bool = False) -> None:
        """Call `see(key, x)` with the inputs of `layers`, which need not be loaded."""
        self._runner.observe_after_blocks(layers, see, held_back)

    def collect(
        self, layers: LayersByKey, second: bool = True
    ) -> AbstractContextManager[dict[str, InputStatistics]]:
        """Return a context with the statistics of the inputs of `layers`, in memory."""
        return collect_statistics(
            self.model,
            self.samples,
            layers,
            self.ctx,
            second=second,
            limit_bytes=sys.maxsize,
            observe=self.observe,
        )


class RunningBlock(PartAfterBlocks):
    """One block of a model in process, with its inputs.

    reference: runs the unchanged model next to it, for cross moments and target outputs.
    """

    def __init__(self, block: Block, reference: SequentialRunner | None, *context: Any) -> None:
        super().__init__(*context)
        self.block, self._reference = block, reference

    @property
    def module(self) -> nn.Module:
        """The module of the block."""
        module: nn.Module = self.block.module
        return module

    def observe(self, layers: LayersByKey, see: InputCallback, *, held_back: bool = False) -> None:
        """Run the unchanged block and call `see(key, x)` with the inputs of `layers`.

        On the calibration samples, or those that are held back. If later blocks also use one of `layers`, all
        blocks up to the last of them run, unchanged, and all uses are observed (see `observe_inputs`).
        """
        self._runner.observe(self.block, layers, see, held_back)

    def group_by_input(self, layers: LayersByKey) -> list[list[str]]:
        """Return the keys of `layers` by their input on the first batch, in the order of their first calls.

        Layers that it does not reach are in the last group.
        """
        first_inputs: dict[str, Tensor] = {}
        groups: list[list[str]] = []
        for key, x in self._runner.layer_inputs(0, self.block, layers):
            if key in first_inputs:
                continue
            group = next((group for group in groups if torch.equal(first_inputs[group[0]], x)), None)
            if group is None:
                groups.append(group := [])
            group.append(key)
            first_inputs[key] = x
        unreached = [key for key in layers if key not in first_inputs]
        return [*groups[:-1], [*groups[-1], *unreached]] if groups else [unreached]

    @contextmanager
    def collect(self, layers: LayersByKey, second: bool = True) -> Iterator[dict[str, InputStatistics]]:
        """Yield the statistics of the inputs of `layers`, in memory; with a reference also cross moments.

        The reference runs the unchanged block then, so this must be called once, before the block is changed.
        Layers that an earlier block has, too, are already changed in the reference.
        """
        with super().collect(layers, second=second) as statistics:
            if self._reference is not None:
                self._add_cross_moments(statistics, layers, self._reference)
            yield statistics

    def collect_own(self, layers: LayersByKey) -> AbstractContextManager[dict[str, InputStatistics]]:
        """Return a context as `collect`, without cross moments; the reference does not run."""
        return super().collect(layers)

    def _add_cross_moments(
        self, statistics: dict[str, InputStatistics], layers: LayersByKey, reference: SequentialRunner
    ) -> None:
        reference.run_before(self.block)
        for entry in statistics.values():
            entry.cross_moment = torch.zeros(entry.width, entry.width, dtype=torch.float64)
        for number in reference.batch_numbers(held_back=False):
            pairs = zip(
                self._runner.layer_inputs(number, self.block, layers),
                reference.layer_inputs(number, self.block, layers),
                strict=True,
            )
            for (key, x), (_, reference_x) in pairs:
                entry = statistics[key]
                assert entry.cross_moment is not None
                entry.cross_moment += ((reference_x - x).float().t() @ x.float()).cpu()
        reference.run_block(self.block)

    def run_reference(self) -> None:
        """Run the unchanged block on its inputs in the unchanged model; call it before the block changes."""
        assert self._reference is not None
        self._reference.run_before(self.block)
        self._reference.run_block(self.block)

    def batch_sizes(self, *, held_back: bool) -> dict[int, int]:
        """Return the numbers of samples of the batches, by the number of the batch."""
        batches = self._runner.batches
        return {n: len(next(iter(batches[n].values()))) for n in self._runner.batch_numbers(held_back)}

    def output_error(self, number: int, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the squared error of the outputs for batch `number` against those of `run_reference`.

        weights: by name, in place of the model's; gradients are passed to them.
        """
        assert self._reference is not None
        difference = self._runner.tokens_after(number, self.block, weights)
        return (difference.float() - self._reference.stored_tokens(number).float()).square().sum()

    def run(self, see: StatesCallback | None = None) -> None:
        """Run the block as it is now and store its outputs, once; call `see` with its inputs and outputs."""
        self._runner.run_block(self.block, see)
