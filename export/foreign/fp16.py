"""The stage `fp16`: a graph of somebody else in float16, what would overflow in float32."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from smelt.core.artifact import Artifact, Format
from smelt.core.data import EVERY_TASK, Task
from smelt.core.errors import InputError, ParityError
from smelt.core.stage import Context, Need, Settings
from smelt.export.foreign.carry import carry, graphs_in

_NAMED = 3
# of the scales of Resize, and of what is made from an attribute that says a type
_FLOAT_INPUTS = (
    "Resize",
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Bernoulli",
    "EyeLike",
)


class Fp16Settings(Settings):
    """Settings of `fp16`."""

    keep: tuple[str, ...] = Field(
        default=(), description="operators that stay float32 besides, for example Softmax"
    )
    rows: int = Field(default=16, ge=1, le=10_000, description="rows on which values are looked at")


class Fp16:
    """Store and compute an ONNX model that somebody else exported in float16, for GPUs.

    Inputs and outputs stay float32. So do nodes whose values, on rows of the data, are beyond what float16
    holds with room to spare, and operators that have no float16. On the CPU ONNX Runtime computes most of
    it in float32 again: the file is half as large, and not faster.

        - fp16: {}
        - fp16: {keep: [Softmax, LayerNormalization]}
    """

    name: ClassVar[str] = "fp16"
    accepts: ClassVar[frozenset[Format]] = frozenset({"onnx"})
    produces: ClassVar[Format] = "onnx"
    needs: ClassVar[frozenset[Need]] = frozenset()
    source: ClassVar[str] = "which operators stay: onnxruntime.transformers.float16"
    version: ClassVar[int] = 1
    foreign: ClassVar[bool] = True
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = Fp16Settings
    tasks: ClassVar[frozenset[Task]] = frozenset(EVERY_TASK)

    def __call__(self, src: Artifact, settings: Fp16Settings, ctx: Context) -> None:
        """Write the float16 graph into `ctx.out`.

        Raises:
            ParityError: an output is not finite where it was.
            InputError: the graph holds graphs of its own (If, Loop, Scan).
            RunError: ONNX Runtime cannot run what was made.
        """
        from smelt.export.foreign.rows import (
            difference,
            note_parity,
            require_one_graph,
            require_runs,
            rows_of,
            run_graph,
        )
        from smelt.export.graph_files import read_graph, write_graph
        from smelt.export.precision.narrow import narrow

        require_one_graph(src, self.name)
        paths = graphs_in(src)
        models = {path: read_graph(path) for path in paths}
        for path, model in models.items():
            _require_flat(model, path.stem)
        carry(src, ctx)
        feeds, real = rows_of(src, ctx, settings.rows)
        if not real:
            ctx.warn("made-up-inputs", "values were looked at on made-up rows: there are none but test")
        always = {*_always_float32(), *settings.keep}
        kept, got, wanted, fed = 0, [], [], []
        for path, model in models.items():
            wide = {node.output[0] for node in model.graph.node if node.op_type in always}
            large = _too_large(model, path.name, feeds[path.stem], ctx)
            ends = {value.name for value in (*model.graph.input, *model.graph.output)}
            narrow(model, path.name, "fp16", wide | large, ends)
            write_graph(model, ctx.out / path.name)
            kept += len(large)
            fed += feeds[path.stem]
            require_runs(ctx.out / path.name, feeds[path.stem])
            got += run_graph(ctx.out / path.name, feeds[path.stem], ctx.threads)
            wanted += run_graph(path, feeds[path.stem], ctx.threads)
        if not np.isfinite(difference(got, wanted, exact=False)):
            raise ParityError(
                "fp16: an output is not finite where it was, or has another shape than before. Give keep:"
                " with the operators that lead there, or leave this step out."
            )
        note_parity(ctx, fed, got, wanted)
        nodes = sum(len(model.graph.node) for model in models.values())
        ctx.facts.update(dtype="fp16", kept_float32=kept, nodes=nodes)


def _always_float32() -> set[str]:
    """Return the operators that have no float16, or some input that is always float32."""
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

    return {*DEFAULT_OP_BLOCK_LIST, *_FLOAT_INPUTS}


def _require_flat(model: Any, name: str) -> None:
    """Refuse graphs whose values other graphs inside of them read, and functions.

    Raises:
        InputError: there is one.
    """
    from smelt.runtime.foreign.structure import inner_graphs, label

    inside = next((node for node in model.graph.node if inner_graphs(node)), None)
    if inside is not None or model.functions:
        what = f"the node {label(inside)} holds a graph" if inside is not None else "the model has functions"
        raise InputError(
            f"fp16: {name}: {what} of its own, which this stage does not follow. Put simplify before it,"
            " which resolves what is constant, or leave fp16 out."
        )


def _too_large(model: Any, name: str, feeds: list[Any], ctx: Context) -> set[str]:
    """Return the first outputs of the nodes that give, read or add up what float16 cannot hold safely."""
    from smelt.export.foreign.rows import fitting
    from smelt.export.graph_files import write_graph
    from smelt.export.precision.blocks import LARGEST, SAFE
    from smelt.export.precision.ranges import MARK, SUM, probe, weights

    with TemporaryDirectory(dir=ctx.out.parent, prefix=".fp16-") as folder:
        write_graph(model, Path(folder, name))  # weights may leave the model for a file, so it is read again
        session = probe(model, Path(folder), Path(name).stem, ctx.threads)
        kinds = {item.name: item.type for item in session.get_inputs()}
        outputs = [output.name for output in session.get_outputs()]
        largest = dict(weights(model))
        sums: dict[str, float] = {}
        for one in feeds:
            for output, value in zip(outputs, session.run(outputs, fitting(one, kinds)), strict=True):
                for mark, into in ((MARK, largest), (SUM, sums)):
                    if output.startswith(mark):
                        key, size = output[len(mark) :], float(value)
                        into[key] = max(into.get(key, 0.0), float("inf") if np.isnan(size) else size)
    found: dict[str, float] = {}
    for node in model.graph.node:
        sizes = [largest[name] for name in (*node.input, *node.output) if not largest.get(name, 0.0) <= SAFE]
        sizes += [sums[name] for name in node.output if not sums.get(name, 0.0) <= LARGEST]
        if sizes:
            found[node.output[0]] = max(sizes)
    if found:
        calls = {node.output[0]: node.name or node.output[0] for node in model.graph.node}
        worst = sorted(found, key=lambda name: -found[name])
        told = ", ".join(f"{calls[name]} ({found[name]:,.0f})" for name in worst[:_NAMED])
        more = f" and {len(worst) - _NAMED} more" if len(worst) > _NAMED else ""
        ctx.warn(
            "kept-float32",
            f"fp16: {len(found)} node{'s stay' if len(found) > 1 else ' stays'} float32, with values that"
            f" float16 (at most 65,504) cannot hold with room to spare: {told}{more}",
        )
    return set(found)
