"""Write and compare the generation graphs of the onnx stage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from smelt.core.stage import Context
from smelt.export.generation_graph.write_generation_graphs import (
    run_generation_graphs,
    verify_generation_graphs,
    write_generation_graphs,
)
from smelt.export.parity.check_parity import ExportedModel
from smelt.export.parity.dequantized_copy import make_dequantized_copy
from smelt.runtime.backends.open_runner import open_folder
from smelt.runtime.batch import Batch
from smelt.runtime.generate.shortlist import SHORTLIST_FILE as SHORTLIST


def add_generation_graphs(
    ctx: Context, subject: ExportedModel, batch: Batch, source: Path, finish: Callable[[], None] | None = None
) -> None:
    """Write the generation graphs; all graphs then share their weights. Compare them in float32.

    A shortlist in the folder `source` is included.

    Args:
        ctx: of the stage.
        subject: the graphs of a step.
        batch: the texts that they are compared on.
        source: the model's folder.
        finish: converts the graphs of a step to the deployed precision, if that rounds; called after the
            float32 graphs were compared.
    """
    names = [graph.name for graph in subject.graphs]
    folders = [ctx.out]
    with ExitStack() as stack:
        if subject.tolerance != "fp32" or finish is not None:
            folders.insert(0, stack.enter_context(make_dequantized_copy(ctx.out, names, widen=False)))
        for folder in folders:
            if finish is not None and folder is ctx.out:
                finish()
            if (source / SHORTLIST).is_file():
                shutil.copyfile(source / SHORTLIST, folder / SHORTLIST)
            write_generation_graphs(folder, names)
            with open_folder(folder, "onnx", subject.target, ctx.threads) as runner:
                ask = verify_generation_graphs if folder is folders[0] else run_generation_graphs
                ask(runner, batch)
