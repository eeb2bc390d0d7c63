"""The stage `simplify`: run onnxsim on a third-party graph; keep the result only if it computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from smelt.core.artifact import Artifact, Format
from smelt.core.errors import RunError
from smelt.core.messages import Message, messages_to_json, warning
from smelt.core.stage import Context, Need, Settings
from smelt.core.system import available_bytes
from smelt.data.splits import ALL_TASKS, Task
from smelt.export.third_party.normalize_graph import copy_graphs, copy_model_files, ordered_graphs
from smelt.runtimes.third_party.isolated_process import IsolatedProcessError, ProcessLimits, run_isolated

_TOLERANCE = 1e-4  # largest difference, of an output's standard deviation
_TOLERANCE_OF_MAX = 1e-5  # or of its largest value: a softmax over thousands of classes deviates by 0.01
_COMPARED_SAMPLES = 16
_SLACK_BYTES = 100_000  # for the shapes that onnxsim records
_MIN_MEMORY_BYTES = 1_500_000_000
_MEMORY_FRACTION = 0.5  # of the free memory


class SimplifySettings(Settings):
    """Settings of `simplify`."""

    seconds: float = Field(default=300.0, gt=0, le=86_400, description="limit of CPU time, seconds")
    memory_gb: float | None = Field(
        default=None, gt=0, description="memory limit, GB; default: half of the free memory"
    )


class Simplify:
    """Fold constants and remove redundant nodes in a third-party ONNX model.

    onnxsim runs in a subprocess with limits of time and memory. Its graph is kept
    if it computes the same on samples of the data, with padding, in batches of
    two sizes, and is not larger; otherwise the graph is not changed and a warning
    gives the reason. Samples are taken from calibration, validation or train.

        - simplify: {}
        - simplify: {seconds: 60, memory_gb: 4}
    """

    name: ClassVar[str] = "simplify"
    accepts: ClassVar[frozenset[Format]] = frozenset({"onnx"})
    produces: ClassVar[Format] = "onnx"
    needs: ClassVar[frozenset[Need]] = frozenset()
    source: ClassVar[str] = "github.com/daquexian/onnx-simplifier"
    version: ClassVar[int] = 2
    third_party_only: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = SimplifySettings
    tasks: ClassVar[frozenset[Task]] = frozenset(ALL_TASKS)

    def __call__(self, src: Artifact, settings: SimplifySettings, ctx: Context) -> None:
        """Write the simplified graph, or the unchanged one, into `ctx.out`."""
        from smelt.export.graph_files import external_data_path, read_graph
        from smelt.export.third_party.graph_samples import require_third_party

        require_third_party(src, self.name)
        copy_model_files(src, ctx)
        copy_graphs(src, ctx)
        paths = ordered_graphs(src)
        samples = SampleFeeds(src, ctx)
        for path in paths:
            with TemporaryDirectory(dir=ctx.out.parent, prefix=".simplify-") as folder:
                candidate = Path(folder, path.name)
                reason = _simplify_isolated(path, candidate, settings) or _rejection(path, candidate, samples)
                if reason is None:
                    for file in (ctx.out / path.name, external_data_path(ctx.out / path.name)):
                        file.unlink(missing_ok=True)
                    for file in (candidate, external_data_path(candidate)):
                        if file.is_file():
                            file.rename(ctx.out / file.name)
            if reason is not None:
                which = f"{path.stem}: " if len(paths) > 1 else ""
                ctx.warnings.append(reason.with_prefix(f"{which}not simplified: "))
        before, after = (
            sum(len(read_graph(folder / path.name, values=False).graph.node) for path in paths)
            for folder in (src.path, ctx.out)
        )
        ctx.details.update(nodes=after, nodes_before=before)


class SampleFeeds:
    """The inputs of the graphs of an artifact, created at first use."""

    def __init__(self, src: Artifact, ctx: Context) -> None:
        self.src, self.ctx = src, ctx
        self._rows: dict[str, Any] = {}

    def for_graph(self, name: str) -> list[Any]:
        """Return inputs of calls of the graph `name`, in batches of two sizes."""
        from smelt.export.third_party.graph_samples import collect_samples, resized_batch

        if not self._rows:
            self._rows, real = collect_samples(self.src, self.ctx, _COMPARED_SAMPLES)
            if not real:
                self.ctx.warn(
                    "made-up-inputs",
                    "The simplified graph was compared on random inputs, because the recipe has only test"
                    " data. Add data: {calibration: FILE}.",
                )
        return [*self._rows[name], *resized_batch(self.src, self._rows[name][0])]


def _simplify_isolated(path: Path, candidate: Path, settings: SimplifySettings) -> Message | None:
    """Write the graph simplified by onnxsim as `candidate`; return a warning if there is none."""
    free = max(_MIN_MEMORY_BYTES, int(_MEMORY_FRACTION * available_bytes()))
    memory = free if settings.memory_gb is None else int(settings.memory_gb * 1e9)
    try:
        answer = run_isolated(__name__, [str(path), str(candidate)], ProcessLimits(memory, settings.seconds))
    except IsolatedProcessError as error:
        return warning(error.code, f"onnxsim was stopped: {error}")
    return None if answer is None else Message(**answer)


def subprocess_main(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Simplify the graph in the first file into the second, in this process; return None or why not."""
    from smelt.export.graph_files import read_graph, write_graph
    from smelt.export.simplify_graph import run_onnxsim
    from smelt.export.third_party.normalize_graph import inline_functions

    source, target = map(Path, arguments)
    bare = read_graph(source, values=False)
    unknown = [v.name for v in bare.graph.input if not v.type.tensor_type.HasField("shape")]
    if unknown:
        text = (
            f"the input '{unknown[0][:80]}' has an unknown number of dimensions, which onnxsim requires."
            " Export the model with a known number of dimensions"
        )
        return messages_to_json([warning("missing-shape", text)])[0]
    with TemporaryDirectory(dir=target.parent) as folder:
        if bare.functions or any(not v.type.tensor_type.HasField("shape") for v in bare.graph.output):
            model = inline_functions(source)
            _annotate_output_shapes(model)
            source = Path(folder, source.name)
            write_graph(model, source)
        after = run_onnxsim(source, Path(folder))
        if isinstance(after, Message):
            return messages_to_json([after])[0]
        write_graph(after, target)
    return None


def _annotate_output_shapes(model: Any) -> None:
    """Record known shapes of outputs that have none, because onnxsim requires them."""
    import onnx

    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.output[:]
    known = {value.name: value for value in onnx.shape_inference.infer_shapes(bare).graph.value_info}
    for value in model.graph.output:
        if not value.type.tensor_type.HasField("shape") and value.name in known:
            value.CopyFrom(known[value.name])


def _rejection(path: Path, candidate: Path, samples: SampleFeeds) -> Message | None:
    """Return the reason why the simplified graph is rejected, or None."""
    from smelt.export.graph_files import external_data_path
    from smelt.export.third_party.graph_samples import (
        batch_size_of,
        max_output_difference,
        require_runnable,
        run_onnx_graph,
    )
    from smelt.runtimes.third_party.signature import read_batch_axes

    def size(path: Path) -> int:
        return sum(file.stat().st_size for file in (path, external_data_path(path)) if file.is_file())

    if size(candidate) > 1.05 * size(path) + _SLACK_BYTES:
        return warning(
            "larger-graph", f"onnxsim made the graph larger ({size(path):,} to {size(candidate):,} bytes)"
        )
    feeds, ctx = samples.for_graph(path.stem), samples.ctx
    try:
        require_runnable(candidate, feeds)
        got, wanted = (run_onnx_graph(graph, feeds, ctx.threads) for graph in (candidate, path))
        off = max_output_difference(got, wanted)
        wrong = _first_mismatch(got, wanted)
    except (RunError, KeyError) as error:
        return warning("graph-failed", f"the simplified graph does not run: {error}")
    if wrong is not None:
        return warning("outputs-changed", f"the outputs of the simplified graph differ ({wrong})")
    before = ctx.details.get("parity", {"rows": 0, "relative": 0.0})
    rows = before["rows"] + sum(batch_size_of(call, read_batch_axes(ctx.out)) for call in feeds)
    ctx.details["parity"] = {"rows": rows, "relative": max(off, before["relative"])}
    return None


def _first_mismatch(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> str | None:
    """Return the first output that differs, and by how much, or None."""
    from smelt.export.third_party.graph_samples import max_output_difference

    for outputs, other in zip(got, wanted, strict=True):
        for name, value in other.items():
            off = max_output_difference([outputs], [{name: value}])
            if off <= _TOLERANCE:
                continue
            largest = np.abs(value[np.isfinite(value)]).max(initial=0.0) if value.dtype.kind == "f" else 0.0
            difference = (
                np.abs(outputs[name] - value)[np.isfinite(value)].max(initial=0.0) if largest else 0.0
            )
            if not np.isfinite(off) or not difference <= _TOLERANCE_OF_MAX * largest:
                return f"output '{name[:80]}': relative difference {off:.2g}"
    return None
