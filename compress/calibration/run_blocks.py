"""Process a model block by block: run a block on its inputs, change it, run it again, continue.

Later blocks are calibrated on the outputs of the changed blocks before them, and only the states between two
blocks are stored, for all samples (as in SparseGPT, GPTQ and Wanda). The model itself calls its blocks: those
before the current one are replaced by the stored states, and masks, rotary positions, windows and biases are
computed by the model's own code, so nothing here depends on a family. The encoder comes first; then the
decoder, on the states of the changed encoder.

    for step in run_blocks(model, rows, ctx):
        step.observe({"fc1": [step.module.fc1]}, see)  # on the unchanged block
        ...  # change step.module in place

Shapes: B = batch, S = tokens of a sequence, D = width of the model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from smelt.compress.calibration.input_hooks import InputCallback, LayersByKey
from smelt.compress.calibration.samples import CalibrationSamples
from smelt.compress.calibration.sequential import STATES_MEMORY_BYTES, SequentialRunner
from smelt.compress.calibration.statistics import batches_on_device
from smelt.compress.train.training_state import torch_threads
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.families.model_blocks import Block, blocks_of
from smelt.families.registry import FAMILIES, family_of
from smelt.runtime.backends.device import torch_device

# Called with a block before its first run and after its last run.
BlockCallback = Callable[[Block], None]
# Calls back with the inputs of layers on all samples (see `observe_inputs`).
ObserveInputs = Callable[[LayersByKey, InputCallback], None]


def ignore_block(block: Block) -> None:
    """Do nothing."""


def run_blocks(
    model: Any,
    rows: CalibrationSamples,
    ctx: Context,
    *,
    stage: str = "calibration",
    enter: BlockCallback = ignore_block,
    leave: BlockCallback = ignore_block,
    behind: Callable[[ObserveInputs], None] | None = None,
    limit_bytes: int = STATES_MEMORY_BYTES,
) -> Iterator[RunningBlock]:
    """Yield each block of `model` once, in order, to be observed and changed in place.

    A repeated block is yielded at its first position. A changed block runs when the next one is requested, so
    the loop must run to its end.

    Args:
        model: of a supported family, float32, in eval mode, on the CPU.
        rows: calibration samples.
        ctx: device, threads, progress; a temporary folder next to `ctx.out` if memory is short.
        stage: the name of the stage, for messages.
        enter: called with a block before its first run.
        leave: called with a block after its last run; only for models whose blocks share no layer.
        behind: called after the last block with a function that observes the layers after the blocks, such as
            the output layer; no block runs for that.
        limit_bytes: memory for the states between two blocks; beyond it they are stored on disk.

    Raises:
        InputError: the family of the model is not supported.
    """
    if family_of(model) is None:
        raise InputError(
            f"{stage}: {model.config.model_type} models are not supported. Supported: {', '.join(FAMILIES)}.",
            code="unsupported-family",
        )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="states-", dir=ctx.out.parent)))
        stack.enter_context(torch_threads(ctx.threads))
        device = torch_device(ctx.device)
        if device != "cpu":
            stack.callback(model.to, "cpu")
            model.to(device)
        walk = SequentialRunner(model, batches_on_device(rows, device), folder, limit_bytes)
        blocks = blocks_of(model)
        for done, block in enumerate(blocks, start=1):
            walk.run_before(block)
            enter(block)
            yield RunningBlock(block, walk)
            walk.run_block(block)
            leave(block)
            ctx.progress(done, len(blocks), block.module_path)
        if behind is not None:
            behind(walk.observe_after_blocks)


class RunningBlock:
    """One block of a model in process, with its inputs."""

    def __init__(self, block: Block, walk: SequentialRunner) -> None:
        self.block, self._walk = block, walk

    @property
    def module(self) -> nn.Module:
        """The module of the block."""
        found: nn.Module = self.block.module
        return found

    def observe(self, layers: LayersByKey, see: InputCallback) -> None:
        """Run the unchanged block on all samples and call `see(key, x)` with the inputs of `layers`.

        If later blocks also use one of `layers`, all blocks up to the last of them run, unchanged, and all
        uses are observed (see `observe_inputs`).
        """
        self._walk.observe(self.block, layers, see)
