"""The stage `fp16`: a graph of somebody else in float16, what would overflow in float32."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from smelt.core.artifact import Artifact, Format
from smelt.core.data import EVERY_TASK, Task
from smelt.core.errors import ParityError
from smelt.core.stage import Context, Need, Settings
from smelt.export.foreign.carry import carry, graphs_in

_NAMED = 3
# Root mean square of the differences in an output's standard deviations; float16 rounds by 0.0005.
_FAR = 0.02
_RANDOM = 0.1  # a difference beyond what float16 gives, of an output's standard deviation
# of the scales of Resize, what is made from an attribute that says a type, the bits of a float32, and what
# ONNX Runtime cannot compute in float16 on the CPU though it says so
_FLOAT_INPUTS = (
    "Resize",
    "BitCast",
    "MeanVarianceNormalization",
    "ScatterElements",
    "ScatterND",
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Bernoulli",
    "EyeLike",
)


class Fp16Settings(Settings):
    """Settings of `fp16`."""

    keep_fp32: tuple[str, ...] = Field(default=(), description="operators kept in float32")
    calibration_samples: int = Field(
        default=16, ge=1, le=10_000, description="samples that ranges are checked on"
    )


class Fp16:
    """Store and compute an ONNX model that somebody else exported in float16, for GPUs.

    Inputs and outputs stay float32, also those of the bodies of If, Loop and Scan. So do nodes whose values,
    on rows of the data, are beyond what float16 holds with room to spare, and operators that have no float16.
    On the CPU ONNX Runtime computes most of it in float32 again: the file is half as large, and not faster.

        - fp16: {}
        - fp16: {keep_fp32: [Softmax, LayerNormalization]}
    """

    name: ClassVar[str] = "fp16"
    accepts: ClassVar[frozenset[Format]] = frozenset({"onnx"})
    produces: ClassVar[Format] = "onnx"
    needs: ClassVar[frozenset[Need]] = frozenset()
    source: ClassVar[str] = "which operators stay: onnxruntime.transformers.float16"
    version: ClassVar[int] = 2
    foreign: ClassVar[bool] = True
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = Fp16Settings
    tasks: ClassVar[frozenset[Task]] = frozenset(EVERY_TASK)

    def __call__(self, src: Artifact, settings: Fp16Settings, ctx: Context) -> None:
        """Write the float16 graph into `ctx.out`.

        Raises:
            ParityError: an output is not finite where it was.
            RunError: ONNX Runtime cannot run what was made.
        """
        from smelt.export.foreign.comparison import Comparison
        from smelt.export.foreign.normalize import normalized
        from smelt.export.foreign.prepared import lift_constants
        from smelt.export.foreign.rows import (
            difference,
            require_one_graph,
            require_runs,
            rows_of,
            run_graph,
        )
        from smelt.export.graph_files import write_graph
        from smelt.export.precision.narrow import narrow
        from smelt.runtime.foreign.signature import row_axes_in

        require_one_graph(src, self.name)
        models = {path: normalized(path) for path in graphs_in(src)}
        carry(src, ctx)
        feeds, real = rows_of(src, ctx, settings.calibration_samples)
        if not real:
            ctx.warn(
                "made-up-inputs",
                "The ranges of values were measured on random inputs, because there is no data but test. Add"
                " data: {calibration: FILE}.",
            )
        kept, got, wanted, fed = 0, [], [], []
        for path, model in models.items():
            lift_constants(model)
            wide = float32_nodes(model, settings.keep_fp32)
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
                "fp16: an output is not finite where it was, or has another shape than before. Give"
                " keep_fp32:"
                " with the operators that lead there, or leave this step out.",
                code="non-finite-outputs",
            )
        found = Comparison(row_axes_in(src.path))
        for one in zip(fed, got, wanted, strict=True):
            found.add(*one)
        found.note(ctx)
        if difference(got, wanted, exact=False) > _RANDOM and _is_random(models, feeds, ctx):
            ctx.warn(
                "random-outputs",
                "The float32 graph returns other outputs in each call, so the error of float16 cannot be"
                " measured. Remove its random nodes, or score outputs that do not depend on them.",
            )
        else:
            for name, how in found.too_far(_FAR, judge_classes=False):
                ctx.warn(
                    "outputs-changed",
                    f"Output '{name}' differs from the float32 graph by {how}. float16 loses digits of values"
                    " below 6e-5: add the operators that compute them to keep.",
                )
        count = sum(len(model.graph.node) for model in models.values())
        ctx.details.update(dtype="fp16", kept_float32=kept, nodes=count)


def _is_random(models: Iterable[Path], feeds: Mapping[str, Any], ctx: Context) -> bool:
    """Say whether the float32 graphs give other outputs in a second call of the same samples."""
    from smelt.export.foreign.rows import difference, run_graph

    for path in models:
        found = run_graph(path, feeds[path.stem] * 2, ctx.threads)
        half = len(found) // 2
        if difference(found[half:], found[:half], exact=False) > _RANDOM:
            return True
    return False


def float32_nodes(model: Any, keep: Collection[str] = ()) -> set[str]:
    """Return the nodes that stay float32 whatever their values are, by the first value that each gives.

    Args:
        model: as `normalized` returns it.
        keep: operators that stay float32 besides.
    """
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

    from smelt.export.precision.types import key_of, opsets_of, slots_of
    from smelt.runtime.foreign.structure import all_nodes

    always, opsets = {*DEFAULT_OP_BLOCK_LIST, *_FLOAT_INPUTS, *keep}, opsets_of(model)
    nodes = list(all_nodes(model.graph.node))
    found = {key_of(node) for node in nodes if node.op_type in always or slots_of(node, opsets) is None}
    return found | _crashing(nodes)


def _crashing(nodes: list[Any]) -> set[str]:
    """Return the Transposes that would crash ONNX Runtime on the CPU if they were float16.

    It casts what it has no float16 product for, and then looks for the shape of a matrix that has none any
    more, where a batch of three dimensions or more is transposed before a product (onnxruntime 1.31,
    MatmulTransposeFusion). Between a Transpose in float32 and the product stands our own Cast.
    """
    multiplied = {name for node in nodes if node.op_type == "MatMul" for name in node.input}
    found = set()
    for node in nodes:
        if node.op_type == "Transpose" and multiplied & set(node.output):
            order = next((list(a.ints) for a in node.attribute if a.name == "perm"), [])
            if len(order) != 2 and order[:1] != [0]:
                found.add(node.output[0])
    return found


def _too_large(model: Any, name: str, feeds: list[Any], ctx: Context) -> set[str]:
    """Return the first outputs of the nodes that give, read or add up what float16 cannot hold safely."""
    from smelt.export.foreign.rows import fitting
    from smelt.export.graph_files import write_graph
    from smelt.export.precision.blocks import LARGEST, SAFE
    from smelt.export.precision.ranges import MARK, SUM, probe, weights
    from smelt.export.precision.types import key_of
    from smelt.runtime.foreign.structure import all_nodes, inner_graphs

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
    nodes = [node for node in all_nodes(model.graph.node) if not inner_graphs(node)]
    for node in nodes:
        sizes = [largest[name] for name in (*node.input, *node.output) if not largest.get(name, 0.0) <= SAFE]
        sizes += [sums[name] for name in node.output if not sums.get(name, 0.0) <= LARGEST]
        if sizes:
            found[key_of(node)] = max(sizes)
    if found:
        calls = {key_of(node): node.name or key_of(node) for node in nodes}
        worst = sorted(found, key=lambda name: -found[name])
        told = ", ".join(f"{calls[name]} ({found[name]:,.0f})" for name in worst[:_NAMED])
        more = f" and {len(worst) - _NAMED} more" if len(worst) > _NAMED else ""
        ctx.warn(
            "kept-float32",
            f"{len(found)} node{'s stay' if len(found) > 1 else ' stays'} float32: their values are close to"
            f" or above the range of float16 (65,504): {told}{more}.",
        )
    return set(found)
