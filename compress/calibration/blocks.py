"""Going through a model block by block: run a block on what it is fed, change it, run it again, go on.

So later blocks are looked at on what the changed ones before them give, and only the states between two
blocks are kept, for all rows at once (as SparseGPT, GPTQ and Wanda go through a model). The model itself
calls its blocks: those before the current one are stood in for by what was kept of them, and its masks,
rotary positions, windows and biases are computed by its own code, so that nothing of a family is written
down here. An encoder comes first; then the decoder, on the fixed states of the changed encoder.

    for step in drive(model, rows, ctx):
        step.observe({"fc1": [step.module.fc1]}, see)  # on the block as it is
        ...  # change step.module in place

Shapes: B = batch, S = tokens of a sequence, D = width of the model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from smelt.compress.calibration.kept_states import Given, KeptStates
from smelt.compress.calibration.observe import Layers, See, watched
from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.calibration.statistics import placed_batches
from smelt.compress.train.data import TensorBatch
from smelt.compress.train.state import threads
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.families.family import Stack
from smelt.families.registry import FAMILIES, family_of
from smelt.families.walk import Block, blocks_of
from smelt.runtime.backends.device import torch_device

# States of all rows that take more than this lie on disk.
MEMORY_BYTES = 2**30

# Told of a block before it is first run and after it was run last.
Told = Callable[[Block], None]
# Shows what layers get on all rows (see `observe`).
Observe = Callable[[Layers, See], None]


def nothing(block: Block) -> None:
    """Be told of a block and do nothing."""


def drive(
    model: Any,
    rows: CalibrationRows,
    ctx: Context,
    *,
    stage: str = "calibration",
    enter: Told = nothing,
    leave: Told = nothing,
    behind: Callable[[Observe], None] | None = None,
    limit_bytes: int = MEMORY_BYTES,
) -> Iterator[DrivenBlock]:
    """Yield each block of `model` once, in order, ready to be looked at and changed in place.

    A block that stands in several places comes at its first one. What was changed is run when the next block
    is asked for, so the loop has to be gone through to its end.

    Args:
        model: of a family, float32, in eval mode, on the CPU.
        rows: what it reads.
        ctx: device, threads, progress; a temporary folder beside `ctx.out` where memory is short.
        stage: the stage's word, for messages.
        enter: called with a block before it runs for the first time.
        leave: called with a block when it is not run any more; of a model whose blocks share no layer.
        behind: called after the last block, with what shows the layers behind it what they get, such as the
            head; no block is run for that.
        limit_bytes: memory for the states between two blocks; beyond it they lie on disk.

    Raises:
        InputError: a model of a family that is not known.
    """
    if family_of(model) is None:
        raise InputError(
            f"{stage}: the blocks of a {model.config.model_type} model are not known."
            f" Known: {', '.join(FAMILIES)}."
        )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="states-", dir=ctx.out.parent)))
        stack.enter_context(threads(ctx.threads))
        device = torch_device(ctx.device)
        if device != "cpu":
            stack.callback(model.to, "cpu")
            model.to(device)
        walk = _Walk(model, placed_batches(rows, device), folder, limit_bytes)
        blocks = blocks_of(model)
        for done, block in enumerate(blocks, start=1):
            walk.reach(block)
            enter(block)
            yield DrivenBlock(block, walk)
            walk.advance(block)
            leave(block)
            ctx.progress(done, len(blocks), block.place)
        if behind is not None:
            behind(walk.observe_behind)


class DrivenBlock:
    """One block of a model that is gone through, with all that it is fed."""

    def __init__(self, block: Block, walk: _Walk) -> None:
        self.block, self._walk = block, walk

    @property
    def module(self) -> nn.Module:
        """The block."""
        found: nn.Module = self.block.module
        return found

    def observe(self, layers: Layers, see: See) -> None:
        """Run the block, as it is, on all rows and call `see(key, x)` with what `layers` get (see `observe`).

        Where later blocks compute with one of `layers` too, those up to the last of them are run besides, as
        they are, and all uses are seen.
        """
        self._walk.observe(self.block, layers, see)


class _Walk:
    """Where in a model we are, and what is kept of it.

    states: by batch, what the last place gave that was run. encoded: by batch, what the encoder gave.
    """

    def __init__(self, model: Any, batches: Sequence[TensorBatch], folder: Path, limit_bytes: int) -> None:
        self.model, self.batches = model, batches
        self.states = KeptStates(folder / "states", limit_bytes)
        self.encoded: KeptStates | None = None
        self._encoded = KeptStates(folder / "encoded", limit_bytes)
        self._stack: Stack | None = None
        self._done = 0  # places of the stack that were run

    def reach(self, block: Block) -> None:
        """Run what stands before `block` and was not run yet."""
        if self._stack is not None and self._stack.name != block.stack.name:
            self._run_to(len(self._places(self._stack)))
            with torch.inference_mode():
                for number in range(len(self.batches)):
                    self._encoded.put(number, self._encoder_states(number))
            self.encoded, self._stack = self._encoded, None
        if self._stack is None:
            self._stack, self._done = block.stack, 0
        self._run_to(block.number)

    def advance(self, block: Block) -> None:
        """Run `block`, and keep what it gives instead of what it was fed."""
        self._run_to(block.number + 1)

    def observe(self, block: Block, layers: Layers, see: See) -> None:
        """Run `block`, and the later ones that hold some of `layers`, and show what those get."""
        wanted = {module for found in layers.values() for module in found}
        places = self._places(block.stack)
        last = max(at for at, m in enumerate(places) if at == block.number or _holds(m, wanted))
        batch: TensorBatch = {}
        with watched(self.model, layers, see, batch), torch.inference_mode():
            for number, inputs in enumerate(self.batches):
                batch.clear()
                batch.update(inputs)
                self._run(number, last)

    def observe_behind(self, layers: Layers, see: See) -> None:
        """Run what stands behind all blocks, on what they gave, and show what `layers` there get."""
        self._run_to(len(self._places(self._current)))
        batch: TensorBatch = {}
        with watched(self.model, layers, see, batch), torch.inference_mode():
            for number, inputs in enumerate(self.batches):
                batch.clear()
                batch.update(inputs)
                with self._standing_in(number, None):
                    self.model(**self._inputs(number))

    def _run_to(self, end: int) -> None:
        """Run the places before `end` that were not run yet."""
        if end > self._done:
            with torch.inference_mode():
                for number in range(len(self.batches)):
                    self.states.put(number, self._run(number, end - 1))
            self._done = end

    def _places(self, stack: Stack) -> list[nn.Module]:
        return list(self.model.get_submodule(stack.place))

    def _run(self, number: int, last: int) -> Given:
        """Return what the place `last` gives for a batch, from what is kept."""
        try:
            with self._standing_in(number, last):
                self.model(**self._inputs(number))
        except _Reached as reached:
            return reached.result
        raise RuntimeError(f"the model never called block {last} of {len(self._places(self._current))}")

    def _encoder_states(self, number: int) -> Given:
        """Return what the encoder makes of what its last block gave, float [B, S, D]."""
        inputs = self.batches[number]
        with self._standing_in(number, None):
            found: Given = self.model.get_encoder()(
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
    def _current(self) -> Stack:
        assert self._stack is not None
        return self._stack

    @contextmanager
    def _standing_in(self, number: int, last: int | None) -> Iterator[None]:
        """Let the places that were run give what is kept of the last of them; end the run behind `last`."""
        places = self._places(self._current)
        kept = self.states.get(number, str(self.model.device)) if self._done else None
        calls = 0

        def stand_in(forward: Callable[..., Given]) -> Callable[..., Given]:
            def call(*args: Any, **kwargs: Any) -> Given:
                nonlocal calls
                at, calls = calls, calls + 1
                if at < self._done:
                    assert kept is not None
                    return kept
                result = forward(*args, **kwargs)
                if at == last:
                    raise _Reached(result)
                return result

            return call

        modules: list[Any] = list(dict.fromkeys(places))
        for module in modules:
            module.forward = stand_in(module.forward)
        try:
            yield
        finally:
            for module in modules:
                del module.forward  # the one of its class is there again


class _Reached(Exception):  # noqa: N818 - no error: it ends a run behind the block that was wanted
    def __init__(self, result: Given) -> None:
        super().__init__()
        self.result = result


def _holds(module: nn.Module, wanted: set[nn.Module]) -> bool:
    return not wanted.isdisjoint(module.modules())
