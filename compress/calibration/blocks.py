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
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from smelt.compress.calibration.observe import Layers, See
from smelt.compress.calibration.rows import CalibrationRows
from smelt.compress.calibration.statistics import placed_batches
from smelt.compress.calibration.walk import MEMORY_BYTES, Walk
from smelt.compress.train.state import threads
from smelt.core.errors import InputError
from smelt.core.stage import Context
from smelt.families.registry import FAMILIES, family_of
from smelt.families.walk import Block, blocks_of
from smelt.runtime.backends.device import torch_device

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
            f" Known: {', '.join(FAMILIES)}.",
            code="unsupported-family",
        )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="states-", dir=ctx.out.parent)))
        stack.enter_context(threads(ctx.threads))
        device = torch_device(ctx.device)
        if device != "cpu":
            stack.callback(model.to, "cpu")
            model.to(device)
        walk = Walk(model, placed_batches(rows, device), folder, limit_bytes)
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

    def __init__(self, block: Block, walk: Walk) -> None:
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
