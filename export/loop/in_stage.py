"""The graphs of whole generations, as the onnx stage writes and compares them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from smelt.core.stage import Context
from smelt.export.loop.write import check_loops, run_loops, write_loops
from smelt.export.parity.check import Subject
from smelt.export.parity.twin import exact_twin
from smelt.runtime.backends.open_runner import open_folder
from smelt.runtime.batch import Batch
from smelt.runtime.generate.shortlist import FILE as SHORTLIST


def add_loops(
    ctx: Context, subject: Subject, batch: Batch, source: Path, finish: Callable[[], None] | None = None
) -> None:
    """Write the graphs of whole generations; all graphs then share their weights. Compare them in float32.

    A shortlist in the folder `source` goes into them.

    Args:
        ctx: of the stage.
        subject: the graphs of a step.
        batch: on which they are compared.
        source: the model's folder.
        finish: makes of the graphs of a step those that are deployed, where these round: it is called once
            the ones that do not were compared.
    """
    names = [graph.name for graph in subject.graphs]
    folders = [ctx.out]
    with ExitStack() as stack:
        if subject.kind != "fp32" or finish is not None:
            folders.insert(0, stack.enter_context(exact_twin(ctx.out, names, half=False)))
        for folder in folders:
            if finish is not None and folder is ctx.out:
                finish()
            if (source / SHORTLIST).is_file():
                shutil.copyfile(source / SHORTLIST, folder / SHORTLIST)
            write_loops(folder, names)
            with open_folder(folder, "onnx", subject.target, ctx.threads) as runner:
                ask = check_loops if folder is folders[0] else run_loops
                ask(runner, batch)
