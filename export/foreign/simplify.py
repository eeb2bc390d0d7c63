"""The stage `simplify`: onnxsim on a graph of somebody else, kept only where it computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from smelt.core.artifact import Artifact, Format
from smelt.core.data import EVERY_TASK, Task
from smelt.core.errors import RunError
from smelt.core.memory import available_bytes
from smelt.core.messages import Message, as_json, warning
from smelt.core.stage import Context, Need, Settings
from smelt.export.foreign.carry import carry, copy_graphs, graphs_in
from smelt.runtime.foreign.limits import FailedError, Limits, ask

_ALLOWED = 1e-4  # largest difference, of an output's standard deviation
_ALLOWED_OF_LARGEST = 1e-5  # or of its largest value: a softmax over thousands of classes deviates by 0.01
_ROWS = 16
_SLACK_BYTES = 100_000  # the shapes that onnxsim writes down
_LEAST_BYTES = 1_500_000_000
_SHARE = 0.5  # of the memory that is free


class SimplifySettings(Settings):
    """Settings of `simplify`."""

    seconds: float = Field(default=300.0, gt=0, le=86_400, description="limit of CPU time")
    memory_gb: float | None = Field(default=None, gt=0, description="default half of the free memory")


class Simplify:
    """Fold constants and drop what does nothing, in an ONNX model that somebody else exported.

    onnxsim runs in a process of its own with a limit of time and of memory. Its graph is kept where it gives
    the same on rows of the data, with their padding, in batches of two sizes, and is not larger; otherwise
    the graph stays as it was, and a warning says why. Rows are taken from calibration, validation or train.

        - simplify: {}
        - simplify: {seconds: 60, memory_gb: 4}
    """

    name: ClassVar[str] = "simplify"
    accepts: ClassVar[frozenset[Format]] = frozenset({"onnx"})
    produces: ClassVar[Format] = "onnx"
    needs: ClassVar[frozenset[Need]] = frozenset()
    source: ClassVar[str] = "github.com/daquexian/onnx-simplifier"
    version: ClassVar[int] = 2
    foreign: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = SimplifySettings
    tasks: ClassVar[frozenset[Task]] = frozenset(EVERY_TASK)

    def __call__(self, src: Artifact, settings: SimplifySettings, ctx: Context) -> None:
        """Write the simplified graph, or the same one, into `ctx.out`."""
        from smelt.export.foreign.rows import require_one_graph
        from smelt.export.graph_files import data_file, read_graph

        require_one_graph(src, self.name)
        carry(src, ctx)
        copy_graphs(src, ctx)
        paths = graphs_in(src)
        fed = Fed(src, ctx)
        for path in paths:
            with TemporaryDirectory(dir=ctx.out.parent, prefix=".simplify-") as folder:
                candidate = Path(folder, path.name)
                reason = _simplify(path, candidate, settings) or _refusal(path, candidate, fed)
                if reason is None:
                    for file in (ctx.out / path.name, data_file(ctx.out / path.name)):
                        file.unlink(missing_ok=True)
                    for file in (candidate, data_file(candidate)):
                        if file.is_file():
                            file.rename(ctx.out / file.name)
            if reason is not None:
                which = f"{path.stem}: " if len(paths) > 1 else ""
                ctx.warnings.append(reason.prefixed(f"{which}not simplified: "))
        before, after = (
            sum(len(read_graph(folder / path.name, values=False).graph.node) for path in paths)
            for folder in (src.path, ctx.out)
        )
        ctx.details.update(nodes=after, nodes_before=before)


class Fed:
    """What the graphs of an artifact are called with, made when it is asked for first."""

    def __init__(self, src: Artifact, ctx: Context) -> None:
        self.src, self.ctx = src, ctx
        self._rows: dict[str, Any] = {}

    def rows(self, name: str) -> list[Any]:
        """Return calls of the graph `name`, of batches of two sizes."""
        from smelt.export.foreign.rows import other_batch, rows_of

        if not self._rows:
            self._rows, real = rows_of(self.src, self.ctx, _ROWS)
            if not real:
                self.ctx.warn(
                    "made-up-inputs",
                    "The simplified graph was compared on random inputs, because there is no data but test."
                    " Add data: {calibration: FILE}.",
                )
        return [*self._rows[name], *other_batch(self.src, self._rows[name][0])]


def _simplify(path: Path, candidate: Path, settings: SimplifySettings) -> Message | None:
    """Write what onnxsim makes of the graph as `candidate`; return why there is nothing."""
    free = max(_LEAST_BYTES, int(_SHARE * available_bytes()))
    memory = free if settings.memory_gb is None else int(settings.memory_gb * 1e9)
    try:
        said = ask(__name__, [str(path), str(candidate)], Limits(memory, settings.seconds))
    except FailedError as error:
        return warning(error.code, f"onnxsim was stopped: {error}")
    return None if said is None else Message(**said)


def answer(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Simplify the graph in the first file into the second, in this process; return why not, or None."""
    from smelt.export.foreign.normalize import inlined
    from smelt.export.graph_files import read_graph, write_graph
    from smelt.export.simplify import simplified

    source, target = map(Path, arguments)
    bare = read_graph(source, values=False)
    unknown = [v.name for v in bare.graph.input if not v.type.tensor_type.HasField("shape")]
    if unknown:
        text = (
            f"its input '{unknown[0][:80]}' says nothing of its shape, which onnxsim needs; export the model"
            " with the number of dimensions at least"
        )
        return as_json([warning("missing-shape", text)])[0]
    with TemporaryDirectory(dir=target.parent) as folder:
        if bare.functions or any(not v.type.tensor_type.HasField("shape") for v in bare.graph.output):
            model = inlined(source)
            _give_shapes(model)
            source = Path(folder, source.name)
            write_graph(model, source)
        after = simplified(source, Path(folder))
        if isinstance(after, Message):
            return as_json([after])[0]
        write_graph(after, target)
    return None


def _give_shapes(model: Any) -> None:
    """Write down the shapes of outputs that have none, as far as they are known: onnxsim asks for them."""
    import onnx

    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.output[:]
    known = {value.name: value for value in onnx.shape_inference.infer_shapes(bare).graph.value_info}
    for value in model.graph.output:
        if not value.type.tensor_type.HasField("shape") and value.name in known:
            value.CopyFrom(known[value.name])


def _refusal(path: Path, candidate: Path, fed: Fed) -> Message | None:
    """Say why the simplified graph is not kept, or None."""
    from smelt.export.foreign.rows import difference, require_runs, rows_in, run_graph
    from smelt.export.graph_files import data_file
    from smelt.runtime.foreign.signature import row_axes_in

    def size(path: Path) -> int:
        return sum(file.stat().st_size for file in (path, data_file(path)) if file.is_file())

    if size(candidate) > 1.05 * size(path) + _SLACK_BYTES:
        return warning(
            "larger-graph", f"onnxsim made it larger ({size(path):,} to {size(candidate):,} bytes)"
        )
    feeds, ctx = fed.rows(path.stem), fed.ctx
    try:
        require_runs(candidate, feeds)
        got, wanted = (run_graph(graph, feeds, ctx.threads) for graph in (candidate, path))
        off = difference(got, wanted)
        wrong = _wrong(got, wanted)
    except (RunError, KeyError) as error:
        return warning("graph-failed", f"the simplified graph does not run: {error}")
    if wrong is not None:
        return warning("outputs-changed", f"it computes something else ({wrong})")
    before = ctx.details.get("parity", {"rows": 0, "relative": 0.0})
    rows = before["rows"] + sum(rows_in(one, row_axes_in(ctx.out)) for one in feeds)
    ctx.details["parity"] = {"rows": rows, "relative": max(off, before["relative"])}
    return None


def _wrong(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> str | None:
    """Return which output is another one, and how far off, or None."""
    from smelt.export.foreign.rows import difference

    for one, other in zip(got, wanted, strict=True):
        for name, value in other.items():
            off = difference([one], [{name: value}])
            if off <= _ALLOWED:
                continue
            largest = np.abs(value[np.isfinite(value)]).max(initial=0.0) if value.dtype.kind == "f" else 0.0
            apart = np.abs(one[name] - value)[np.isfinite(value)].max(initial=0.0) if largest else 0.0
            if not np.isfinite(off) or not apart <= _ALLOWED_OF_LARGEST * largest:
                return f"output '{name[:80]}': relative difference {off:.2g}"
    return None
