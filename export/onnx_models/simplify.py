"""The stage `simplify` of third-party graphs: onnxsim, or onnxslim where onnxsim fails.

A result is kept only if it computes the same. Both run in a process with limits of time and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from smelt.core.artifact import Artifact, Format
from smelt.core.errors import RunError
from smelt.core.messages import Message, messages_to_json, warning
from smelt.core.system import IsolatedProcessError, ProcessLimits, available_bytes, run_isolated
from smelt.data.tasks import GRAPH_TASKS, Task
from smelt.export.onnx_models.normalize_graph import copy_graphs, copy_model_files, ordered_graphs
from smelt.stage import Context, Settings, Stage

_TOLERANCE = 1e-4  # largest difference, of an output's standard deviation
_TOLERANCE_OF_MAX = 1e-5  # or of its largest value: a softmax over thousands of classes deviates by 0.01
_COMPARED_SAMPLES = 16
_TOOLS = ("onnxsim", "onnxslim")  # in the order in which they are tried
_SLACK_BYTES = 100_000  # for the shapes that onnxsim records
_MIN_MEMORY_BYTES = 1_500_000_000
_MEMORY_FRACTION = 0.5  # of the free memory


class SimplifySettings(Settings):
    """Settings of `simplify`."""

    time_limit_seconds: float = Field(default=300.0, gt=0, le=86_400, description="limit of CPU time")
    memory_gb: float | None = Field(
        default=None, gt=0, description="memory limit, GB; default: half of the free memory"
    )


class Simplify(Stage[SimplifySettings]):
    """Fold constants and remove redundant nodes in a third-party ONNX model.

    onnxsim runs in a subprocess with limits of time and memory. Its graph is kept
    if it computes the same on samples of the data, with padding, in batches of
    two sizes, and is not larger; otherwise onnxslim is tried, if it is installed.
    Where neither works, the graph is not changed and a warning gives the reason.
    Samples are taken from calibration, validation or train.

        - simplify: {}
        - simplify: {time_limit_seconds: 60, memory_gb: 4}
    """

    name: ClassVar[str] = "simplify"
    accepts: ClassVar[frozenset[Format]] = frozenset({"onnx"})
    produces: ClassVar[Format] = "onnx"
    source: ClassVar[str] = "github.com/daquexian/onnx-simplifier, github.com/inisis/OnnxSlim"
    version: ClassVar[int] = 4
    imported_only: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = SimplifySettings
    tasks: ClassVar[frozenset[Task]] = frozenset(GRAPH_TASKS)

    def __call__(self, src: Artifact, settings: SimplifySettings, ctx: Context) -> None:
        """Write the simplified graph, or the unchanged one, into `ctx.out`."""
        from smelt.export.graph_files import read_graph
        from smelt.export.onnx_models.graph_samples import require_imported

        require_imported(src, self.name)
        copy_model_files(src, ctx)
        copy_graphs(src, ctx)
        paths = ordered_graphs(src)
        samples = SampleFeeds(src, ctx)
        for path in paths:
            reasons = []
            for tool in _TOOLS:
                if tool == "onnxslim" and find_spec(tool) is None:
                    continue
                reason = _simplify_with(tool, path, settings, samples)
                if reason is None:
                    ctx.details["simplified_by"] = tool
                    break
                reasons.append(reason)
            else:
                which = f"{path.stem}: " if len(paths) > 1 else ""
                ctx.warnings.extend(reason.with_prefix(f"{which}not simplified: ") for reason in reasons)
        nodes_before, nodes_after = (
            sum(len(read_graph(folder / path.name, values=False).graph.node) for path in paths)
            for folder in (src.path, ctx.out)
        )
        ctx.details.update(nodes=nodes_after, nodes_before=nodes_before)


def _simplify_with(tool: str, path: Path, settings: SimplifySettings, samples: SampleFeeds) -> Message | None:
    """Write the graph simplified by `tool` into the output, or return why it is not used."""
    from smelt.export.graph_files import external_data_path

    out = samples.ctx.out
    with TemporaryDirectory(dir=out.parent, prefix=".simplify-") as folder:
        candidate = Path(folder, path.name)
        reason = _simplify_isolated(tool, path, candidate, settings)
        reason = reason or _rejection(tool, path, candidate, samples)
        if reason is None:
            for file in (out / path.name, external_data_path(out / path.name)):
                file.unlink(missing_ok=True)
            for file in (candidate, external_data_path(candidate)):
                if file.is_file():
                    file.rename(out / file.name)
    return reason


class SampleFeeds:
    """The inputs of the graphs of an artifact, created at first use."""

    def __init__(self, src: Artifact, ctx: Context) -> None:
        self.src, self.ctx = src, ctx
        self._rows: dict[str, Any] = {}

    def for_graph(self, path: Path) -> list[Any]:
        """Return inputs of calls of the graph `path`, in batches of two sizes if it runs with both."""
        from smelt.export.onnx_models.graph_samples import collect_samples, resized_batch, run_onnx_graph

        if not self._rows:
            self._rows, is_real = collect_samples(self.src, self.ctx, _COMPARED_SAMPLES)
            if not is_real:
                self.ctx.warn(
                    "made-up-inputs",
                    "The simplified graph was compared on random inputs, because the recipe has only test"
                    " data. Add data: {calibration: FILE}.",
                )
        rows = self._rows[path.stem]
        resized = list(resized_batch(self.src, rows[0]))
        try:
            run_onnx_graph(path, resized, self.ctx.threads)
        except RunError:  # a state of batch size 1
            return rows
        return [*rows, *resized]


def _simplify_isolated(tool: str, path: Path, candidate: Path, settings: SimplifySettings) -> Message | None:
    """Write the graph simplified by `tool` as `candidate`; return a warning if there is none."""
    free_bytes = max(_MIN_MEMORY_BYTES, int(_MEMORY_FRACTION * available_bytes()))
    memory = free_bytes if settings.memory_gb is None else int(settings.memory_gb * 1e9)
    try:
        limits = ProcessLimits(memory, settings.time_limit_seconds)
        answer = run_isolated(__name__, [tool, str(path), str(candidate)], limits)
    except IsolatedProcessError as error:
        return warning(error.code, f"{tool} was stopped: {error}")
    return None if answer is None else Message(**answer)


def subprocess_main(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Simplify a graph in this process; return None or why not.

    arguments: the tool, the file of the graph, and the one to write.
    """
    source, target = map(Path, arguments[1:])
    reason = (_write_slimmed if arguments[0] == "onnxslim" else _write_simplified)(source, target)
    return None if reason is None else messages_to_json([reason])[0]


def _write_slimmed(source: Path, target: Path) -> Message | None:
    """Write the graph simplified by onnxslim; return a warning if it failed."""
    import onnxslim

    from smelt.export.graph_files import write_graph
    from smelt.export.onnx_models.normalize_graph import inline_functions

    try:
        write_graph(onnxslim.slim(inline_functions(source)), target)
    except Exception as error:  # whatever its passes raise, the unsimplified graph is valid
        return warning("onnxslim-failed", f"onnxslim failed: {' '.join(str(error).split())[:300]}")
    return None


def _write_simplified(source: Path, target: Path) -> Message | None:
    """Write the graph simplified by onnxsim; return a warning if it failed."""
    from smelt.export.graph_files import read_graph, write_graph
    from smelt.export.onnx_models.normalize_graph import inline_functions
    from smelt.export.simplify_graph import run_onnxsim

    structure = read_graph(source, values=False)
    unranked_inputs = [v.name for v in structure.graph.input if not v.type.tensor_type.HasField("shape")]
    if unranked_inputs:
        text = (
            f"the input '{unranked_inputs[0][:80]}' has an unknown number of dimensions, which "
            "onnxsim requires."
            " Export the model with a known number of dimensions"
        )
        return warning("missing-shape", text)
    with TemporaryDirectory(dir=target.parent) as folder:
        if structure.functions or any(
            not v.type.tensor_type.HasField("shape") for v in structure.graph.output
        ):
            model = inline_functions(source)
            _annotate_output_shapes(model)
            source = Path(folder, source.name)
            write_graph(model, source)
        simplified = run_onnxsim(source, Path(folder))
        if isinstance(simplified, Message):
            return simplified
        write_graph(simplified, target)
    return None


def _annotate_output_shapes(model: Any) -> None:
    """Record known shapes of outputs that have none, because onnxsim requires them."""
    import onnx

    unshaped_model = onnx.ModelProto()
    unshaped_model.CopyFrom(model)
    del unshaped_model.graph.output[:]
    inferred_values = {
        value.name: value for value in onnx.shape_inference.infer_shapes(unshaped_model).graph.value_info
    }
    for value in model.graph.output:
        if not value.type.tensor_type.HasField("shape") and value.name in inferred_values:
            value.CopyFrom(inferred_values[value.name])


def _rejection(tool: str, path: Path, candidate: Path, samples: SampleFeeds) -> Message | None:
    """Return the reason why the graph simplified by `tool` is rejected, or None."""
    from smelt.export.graph_files import graph_bytes
    from smelt.export.onnx_models.graph_samples import (
        batch_size_of,
        max_output_difference,
        require_runnable,
        run_onnx_graph,
    )
    from smelt.runtimes.onnx_import.signature import read_batch_axes

    before, after = graph_bytes(path), graph_bytes(candidate)
    if after > 1.05 * before + _SLACK_BYTES:
        return warning("larger-graph", f"{tool} made the graph larger ({before:,} to {after:,} bytes)")
    feeds, ctx = samples.for_graph(path), samples.ctx
    try:
        require_runnable(candidate, feeds)
        simplified_outputs, original_outputs = (
            run_onnx_graph(graph, feeds, ctx.threads) for graph in (candidate, path)
        )
        off = max_output_difference(simplified_outputs, original_outputs)
        wrong = _first_mismatch(simplified_outputs, original_outputs)
    except (RunError, KeyError) as error:
        return warning("graph-failed", f"the graph of {tool} does not run: {error}")
    if wrong is not None:
        return warning("outputs-changed", f"the outputs of the graph of {tool} differ ({wrong})")
    previous_parity = ctx.details.get("parity", {"rows": 0, "relative": 0.0})
    num_rows = previous_parity["rows"] + sum(batch_size_of(call, read_batch_axes(ctx.out)) for call in feeds)
    ctx.details["parity"] = {"rows": num_rows, "relative": max(off, previous_parity["relative"])}
    return None


def _first_mismatch(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> str | None:
    """Return the first output that differs, and by how much, or None."""
    from smelt.export.onnx_models.graph_samples import max_output_difference

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
