"""The loops over the blocks of a model: changed in place one after the other, on the outputs of those before.

See `smelt.calibration.sequential`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from smelt.calibration.samples import CalibrationSamples
from smelt.calibration.sequential import (
    STATES_MEMORY_BYTES,
    PartAfterBlocks,
    RunningBlock,
    SequentialRunner,
)
from smelt.calibration.statistics import batches_on_device
from smelt.core.errors import InputError
from smelt.models.families.registry import FAMILIES, Block, blocks_of, family_of
from smelt.models.streamed_model import StreamedModel
from smelt.runtimes.device import torch_device, torch_threads
from smelt.stage import Context


def run_parts(
    model: Any,
    samples: CalibrationSamples,
    ctx: Context,
    *,
    stage: str = "calibration",
    offloaded: StreamedModel | None = None,
    save: bool = True,
    with_reference: bool = False,
    limit_bytes: int = STATES_MEMORY_BYTES,
) -> Iterator[PartAfterBlocks]:
    """Yield each block of `model` as in `run_blocks`, and the layers after the blocks at the end.

    with_reference: whether the unchanged model runs next to it, for cross moments and target outputs.
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
        batches = batches_on_device(samples, device)
        held_back = [] if samples.held_back is None else batches_on_device(samples.held_back, device)
        runner = SequentialRunner(model, [*batches, *held_back], folder, limit_bytes, len(held_back))
        reference = None
        if with_reference:
            reference = SequentialRunner(
                model, runner.batches, folder / "reference", limit_bytes, len(held_back)
            )
        for block in visit_blocks(model, ctx, offloaded, save):
            runner.run_before(block)
            step = RunningBlock(block, reference, model, samples, ctx, runner)
            yield step
            step.run()
        yield PartAfterBlocks(model, samples, ctx, runner)


def run_blocks(
    model: Any,
    samples: CalibrationSamples,
    ctx: Context,
    *,
    stage: str = "calibration",
    offloaded: StreamedModel | None = None,
    save: bool = True,
    limit_bytes: int = STATES_MEMORY_BYTES,
) -> Iterator[RunningBlock]:
    """Yield each block of `model` once, in order, to be observed and changed in place.

    A repeated block is yielded at its first position. A changed block runs when its `run` is called, else
    when the next one is requested, so the loop must run to its end.

    Args:
        model: of a supported family, float32, in eval mode, on the CPU.
        samples: calibration samples.
        ctx: device, threads, progress; a temporary folder next to `ctx.out` if memory is short.
        stage: the name of the stage, for messages.
        offloaded: see `visit_blocks`.
        save: see `visit_blocks`.
        limit_bytes: memory for the states between two blocks; beyond it they are stored on disk.

    Raises:
        InputError: the family of the model is not supported.
    """
    parts = run_parts(
        model, samples, ctx, stage=stage, offloaded=offloaded, save=save, limit_bytes=limit_bytes
    )
    return (part for part in parts if isinstance(part, RunningBlock))


def visit_blocks(
    model: Any, ctx: Context, offloaded: StreamedModel | None = None, save: bool = True
) -> Iterator[Block]:
    """Yield each block of `model` once, in order.

    Args:
        model: in memory, or that of `offloaded`.
        ctx: reports progress.
        offloaded: a model of which only the yielded block is in memory; its blocks share no layer.
        save: whether a block of `offloaded` is written afterwards, or only freed.
    """
    for done, block in enumerate(blocks := blocks_of(model), start=1):
        if offloaded is not None:
            offloaded.load_block(block)
        yield block
        if offloaded is not None:
            (offloaded.save_block if save else offloaded.free_block)(block)
        ctx.progress(done, len(blocks), block.module_path)
