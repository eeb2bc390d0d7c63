"""The stage `quantize-onnx`: run ONNX Runtime's quantizers on a third-party graph, and make the result valid.

The quantizers' graphs are corrected in node order, domains and scales of stacked matrices.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np

from smelt.core.artifact import Artifact, Format
from smelt.core.errors import RunError
from smelt.data.npz_arrays import SampleAxes
from smelt.data.tasks import ALL_TASKS, Task, task_traits
from smelt.export.onnx_models.normalize_graph import (
    copy_graphs,
    copy_model_files,
    inline_functions,
    iter_model_nodes,
    match_nodes,
    ordered_graphs,
    rename_reserved,
    restore_names,
)
from smelt.export.onnx_models.ort_quantizers import WEIGHTED_OPS, QuantizeOnnxSettings, run_ort_quantizer
from smelt.export.onnx_models.output_comparison import (
    OutputComparison,
    remove_passthrough_outputs,
    require_close,
    restore_passthrough_outputs,
)
from smelt.export.onnx_models.prepare_for_quantizer import PER_CHANNEL_OPSET, prepare_for_quantizer
from smelt.models.step_size import SizeInputs, StepSize, one_shot_size
from smelt.quantization.schemes.registry import DEFAULT_SCHEME, STATIC_SCHEME
from smelt.runtimes.graph_walk import all_nodes, node_inputs, separate_int8_readers, subgraphs
from smelt.runtimes.onnx_import.float_matrices import float_matrices_message
from smelt.stage import Context, Need, Settings, Stage


def finalize_quantized(quantized: Path, source: Path) -> Any:
    """Return the quantized graph in `quantized` as a valid onnx.ModelProto.

    - The quantizers sort nodes without considering outer values that inner graphs (If, Loop, Scan) read.
    - They drop the domain of nodes that contain graphs (com.microsoft.BeamSearch).
    - A stack of matrices has one scale per column of all its matrices; MatMulInteger requires zero points and
      scales of the shape of the stack, with one row.
    - Of int8 weights and zero points each node reads its own (`separate_int8_readers`).

    Args:
        quantized: the output of a quantizer.
        source: its input.
    """
    from smelt.export.graph_files import read_graph

    model = read_graph(quantized)
    domains = {
        node.output[0]: node.domain
        for node in all_nodes(read_graph(source, values=False).graph.node)
        if subgraphs(node)
    }
    for node in all_nodes(model.graph.node):
        if subgraphs(node):
            node.domain = domains.get(node.output[0], node.domain)
    _sort_topologically(model.graph)
    _broadcast_scales(model.graph)
    separate_int8_readers(model.graph)
    return model


def _sort_topologically(graph: Any) -> None:
    """Sort nodes topologically and otherwise keep their order; also in inner graphs."""
    # not onnx_ir 1.1's TopologicalSortPass: reading a graph, onnx_ir drops its sparse initializers
    producers = {
        name: node_index for node_index, node in enumerate(graph.node) for name in node.output if name
    }
    nodes = list(graph.node)
    dependencies = [
        sorted({producers[name] for name in node_inputs(node) if name in producers}) for node in nodes
    ]
    done: set[int] = set()
    order: list[int] = []
    for first in range(len(nodes)):
        stack = [first]
        while stack:
            node_index = stack[-1]
            open_ends = [source for source in dependencies[node_index] if source not in done]
            if node_index in done or not open_ends:
                stack.pop()
                if node_index not in done:
                    done.add(node_index)
                    order.append(node_index)
            else:
                stack += open_ends[::-1]
    if order != sorted(order):
        del graph.node[:]
        graph.node.extend([nodes[node_index] for node_index in order])
    for node in graph.node:
        for body in subgraphs(node):
            _sort_topologically(body)


def _broadcast_scales(graph: Any) -> None:
    """Give the zero points and scales of stacked matrices the shape that MatMulInteger requires."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in all_nodes(graph.node):
        if node.op_type != "MatMulInteger" or len(node.input) < 4:
            continue
        matrix, zero = tensors.get(node.input[1]), tensors.get(node.input[3])
        if matrix is None or zero is None or len(matrix.dims) < 3 or len(zero.dims) != 1:
            continue
        scale = tensors.get(f"{node.input[3].removesuffix('_zero_point')}_scale")
        shape = [*matrix.dims[:-2], 1, matrix.dims[-1]]
        for tensor in (zero, scale):
            if tensor is not None and list(tensor.dims) == [shape[-1]]:
                _broadcast_tensor(tensor, shape)


def _broadcast_tensor(tensor: Any, shape: Sequence[int]) -> None:
    from onnx import numpy_helper

    values = np.broadcast_to(numpy_helper.to_array(tensor), shape)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), tensor.name))


_QUANTIZED_OPS = frozenset(
    {
        *("QuantizeLinear", "DequantizeLinear", "MatMulInteger", "DynamicQuantizeLinear", "ConvInteger"),
        *("DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QAttention", "QEmbedLayerNormalization"),
    }
)
_MIN_REPEATED = 0.05  # fraction of the bytes of all weights, above which equal ones are stored once
_SLACK_BYTES = 100_000  # for the nodes that int8 adds to a small graph
_MAX_COMPARED = 64  # samples on which the quantized graph is compared with the float one

# Of a quantized weight: one, and its share of scales.
_QUANTIZED_BYTES = 1.05


class QuantizeOnnx(Stage[QuantizeOnnxSettings]):
    """Quantize a third-party ONNX model to int8.

    ONNX Runtime's quantizers, with the settings below. In a recipe that starts
    from an ONNX model, `quantize` means this stage too. The quantized graph is
    run on samples of the data; its difference from the float graph is reported
    as agreement and parity.

        - quantize-onnx: {scheme: int8-dynamic}
        - quantize-onnx: {scheme: int8-static, calibration_method: entropy}
        - quantize-onnx: {scheme: int8-static, exclude: [/head/MatMul, /pooler/*]}
    """

    name: ClassVar[str] = "quantize-onnx"
    accepts: ClassVar[frozenset[Format]] = frozenset({"onnx"})
    produces: ClassVar[Format] = "onnx"
    may_need: ClassVar[frozenset[Need]] = frozenset({"calibration"})
    source: ClassVar[str] = (
        "onnxruntime.quantization, https://onnxruntime.ai/docs/performance/model-optimizations"
    )
    version: ClassVar[int] = 8
    imported_only: ClassVar[bool] = True
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = QuantizeOnnxSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(ALL_TASKS)

    @classmethod
    def needs_with(cls, settings: QuantizeOnnxSettings, available: Collection[str] = ()) -> frozenset[Need]:
        """Return calibration if ranges are calibrated; no split may replace it."""
        if not settings.uses_calibration or set(available) & {"validation", "train"}:
            return frozenset()
        return frozenset({"calibration"})

    @classmethod
    def estimate_size(cls, settings: QuantizeOnnxSettings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step."""
        result = inputs.source.stored_as(_QUANTIZED_BYTES, _QUANTIZED_BYTES)
        return one_shot_size(inputs, result=result, more_bytes=inputs.source.stored_bytes)

    def __call__(self, src: Artifact, settings: QuantizeOnnxSettings, ctx: Context) -> None:
        """Write the quantized graph into `ctx.out`.

        Raises:
            InputError: `exclude` names a node that the graph does not have.
            RunError: the quantizer fails, or ONNX Runtime cannot run its graph (`graph-crashes`).
            ParityError: its outputs are too far from those of the float graph (`quantization-error`).
        """
        from smelt.export.graph_files import read_graph
        from smelt.export.onnx_models.graph_samples import (
            collect_samples,
            require_imported,
            require_runnable,
        )
        from smelt.runtimes.onnx_import.signature import read_batch_axes

        require_imported(src, self.name)
        copy_model_files(src, ctx)
        paths = ordered_graphs(src)
        settings = _expand_exclude(paths, settings)
        original_models = [read_graph(path, values=False) for path in paths]
        products = {*WEIGHTED_OPS, *settings.op_types}
        if not any(node.op_type in products for model in original_models for node in iter_model_nodes(model)):
            copy_graphs(src, ctx)  # decision trees, linear classifiers
            _report(src, paths, settings, ctx)
            return
        # samples of arrays have one shape, so several per call would only need more memory
        single_sample = settings.uses_calibration and task_traits(src.manifest.task).modality == "arrays"
        feeds, is_real = collect_samples(
            src, ctx, settings.calibration_samples, batch_size=1 if single_sample else 4
        )
        axes = read_batch_axes(src.path)
        comparison = OutputComparison(axes)
        for path in paths:
            graph_feeds = feeds[path.stem]
            _write_quantized(path, settings, graph_feeds, ctx)
            require_runnable(ctx.out / path.name, graph_feeds)
            _compare_graphs(comparison, ctx.out / path.name, path, graph_feeds, ctx)
        _report(src, paths, settings, ctx)
        comparison.record(ctx)
        if is_real:
            self._require_accuracy(comparison, paths, feeds, settings, ctx)
        else:
            ctx.warn(
                "made-up-inputs",
                "The quantized graph was compared on random inputs, because the recipe has only test data."
                " Add data: {calibration: FILE}.",
            )
        ctx.details.update(scheme=settings.scheme, target=settings.target)

    @staticmethod
    def _require_accuracy(
        comparison: OutputComparison,
        paths: list[Path],
        feeds: Any,
        settings: QuantizeOnnxSettings,
        ctx: Context,
    ) -> None:
        """Require that outputs are close to the float graph's, unless that graph is random itself."""
        judge_classes = settings.max_difference is None
        noise = None
        if any(comparison.exceeding(settings.difference_limit, judge_classes)):
            noise = OutputComparison(comparison.axes)
            for path in paths:
                _measure_noise(noise, path, feeds[path.stem], ctx)
        require_close(comparison, settings.difference_limit, judge_classes, _advice(settings), ctx, noise)


def _compare_graphs(
    comparison: OutputComparison, new: Path, old: Path, feeds: list[Any], ctx: Context
) -> None:
    """Run both graphs on up to `_MAX_COMPARED` samples, spread over `feeds`."""
    from smelt.export.onnx_models.graph_samples import iter_graph_outputs

    samples = _select_samples(feeds, comparison.axes)
    pairs = zip(
        iter_graph_outputs(new, samples, ctx.threads),
        iter_graph_outputs(old, samples, ctx.threads),
        strict=True,
    )
    for inputs, (quantized_outputs, float_outputs) in zip(samples, pairs, strict=True):
        comparison.add(inputs, quantized_outputs, float_outputs)


def _measure_noise(noise: OutputComparison, path: Path, feeds: list[Any], ctx: Context) -> None:
    """Run the float graph twice on the samples of `_compare_graphs`; outputs that are random differ."""
    from smelt.export.onnx_models.graph_samples import iter_graph_outputs

    samples = _select_samples(feeds, noise.axes)
    repeated_outputs = iter_graph_outputs(
        path, [repeated for inputs in samples for repeated in (inputs, inputs)], ctx.threads
    )
    for inputs in samples:
        noise.add(inputs, next(repeated_outputs), next(repeated_outputs))


def _select_samples(feeds: list[Any], axes: SampleAxes) -> list[Any]:
    from smelt.export.onnx_models.graph_samples import batch_size_of

    calls = max(1, _MAX_COMPARED // batch_size_of(feeds[0], axes))
    return feeds[:: max(1, -(-len(feeds) // calls))]


def _advice(settings: QuantizeOnnxSettings) -> str:
    """Return what a user can change to reduce the error."""
    suggestions = ["add nodes that need float32 to `exclude`"]
    if not settings.per_channel:
        suggestions.append("set per_channel: true")
    if settings.op_types:
        suggestions.append(
            "remove `op_types`, so that only matrix multiplications and convolutions are quantized"
        )
    if settings.uses_calibration:
        alternatives = [
            name for name in ("minmax", "percentile", "entropy") if name != settings.calibration_method
        ]
        suggestions += [
            f"try calibration_method: {alternatives[0]}",
            "use more calibration samples, similar to the model's inputs",
        ]
        if settings.target == "ort-cpu":
            suggestions.append(f"set scheme: {DEFAULT_SCHEME}")
    return f"Options: {'; '.join(suggestions)}."


def _write_quantized(path: Path, settings: QuantizeOnnxSettings, feeds: list[Any], ctx: Context) -> None:
    """Quantize the graph in `path` and write it into `ctx.out`.

    Raises:
        RunError: the quantizer fails.
    """
    from smelt.export.graph_files import (
        external_data_path,
        inline_weight_bytes,
        share_weights,
        write_graph,
    )
    from smelt.runtimes.onnx_session import silence_onnxruntime

    with TemporaryDirectory(dir=ctx.out.parent, prefix=".quantize-") as folder:
        quantized, ready_in, named_in = (
            Path(folder, path.name),
            Path(folder, "prepared"),
            Path(folder, "named"),
        )
        ready_in.mkdir()
        named_in.mkdir()
        disabled = logging.root.manager.disable  # the level of the caller
        try:
            # it always logs that a graph can be preprocessed first, which `simplify` does
            logging.disable(max(disabled, logging.WARNING))
            source, passed = remove_passthrough_outputs(path, Path(folder, "passed"))
            ready, opset = prepare_for_quantizer(source, ready_in)
            ready, names = rename_reserved(ready, named_in, settings.exclude)
            renamed = {original_name: safe_name for safe_name, original_name in names.items()}
            renamed_feeds = [
                {renamed.get(name, name): value for name, value in inputs.items()} for inputs in feeds
            ]
            with silence_onnxruntime():
                run_ort_quantizer(
                    ready, quantized, _per_tensor_settings(opset, settings, ctx), renamed_feeds, ctx
                )
            model = finalize_quantized(quantized, ready)
            restore_names(model, names)
        except Exception as error:  # a library with many classes of errors; no graph is written
            error_text = " ".join(str(error).split())[:400]
            raise RunError(
                f"onnxruntime.quantization failed on {path.name}: {error_text}", code="quantizer-failed"
            ) from error
        finally:
            logging.disable(disabled)
        model = restore_passthrough_outputs(model, passed)
        shared = _repeated_bytes(model) > _MIN_REPEATED * inline_weight_bytes(model)
        write_graph(model, ctx.out / path.name)
        if shared:
            share_weights([ctx.out / path.name], external_data_path(Path(path.name)).name)


def _repeated_bytes(model: Any) -> int:
    """Return the bytes of the weights that are equal to another one.

    Nodes that share a weight have a copy each (`prepare_for_quantizer`, `finalize_quantized`), which the
    data file stores once.
    """
    from smelt.export.graph_files import MIN_EXTERNAL_BYTES

    seen: set[bytes] = set()
    repeated = 0
    for tensor in model.graph.initializer:
        content = tensor.raw_data
        if len(content) < MIN_EXTERNAL_BYTES:  # remains in the graph
            continue
        key = hashlib.sha256(content).digest()
        repeated += len(content) if key in seen else 0
        seen.add(key)
    return repeated


def _per_tensor_settings(opset: int, settings: QuantizeOnnxSettings, ctx: Context) -> QuantizeOnnxSettings:
    """Return `settings` as the opset allows: its DequantizeLinear may not support scales per output."""
    if opset >= PER_CHANNEL_OPSET or not settings.uses_calibration or not settings.per_channel:
        return settings
    ctx.warn(
        "per-tensor-weights",
        f"Weights have one scale per matrix, because opset {opset} does not support per-channel scales and"
        f" onnx cannot convert this model. Export it with opset {PER_CHANNEL_OPSET} or newer.",
    )
    return settings.model_copy(update={"per_channel": False})


def _expand_exclude(paths: list[Path], settings: QuantizeOnnxSettings) -> QuantizeOnnxSettings:
    """Return `settings` with the names of the nodes that the patterns of `exclude` match."""
    from smelt.export.graph_files import read_graph

    if not settings.exclude:
        return settings
    graphs = [read_graph(path, values=False) for path in paths]
    graphs = [
        inline_functions(path) if graph.functions else graph
        for path, graph in zip(paths, graphs, strict=True)
    ]
    names = [node.name for graph in graphs for node in iter_model_nodes(graph) if node.name]
    return settings.model_copy(update={"exclude": tuple(match_nodes(settings.exclude, names, "exclude"))})


def _report(src: Artifact, paths: list[Path], settings: QuantizeOnnxSettings, ctx: Context) -> None:
    """Record what was quantized; warn if nothing was, with the possible reason, or if the files grew.

    Where nothing was quantized, the graphs of `src` remain as they are.
    """
    from smelt.export.graph_files import external_data_path, graph_bytes, read_graph

    models = [read_graph(ctx.out / path.name, values=False) for path in paths]
    operators = Counter(node.op_type for model in models for node in iter_model_nodes(model))
    if not _QUANTIZED_OPS & set(operators):
        for path in paths:
            external_data_path(ctx.out / path.name).unlink(missing_ok=True)
        copy_graphs(src, ctx)
        models = [read_graph(path, values=False) for path in paths]
        operators = Counter(node.op_type for model in models for node in iter_model_nodes(model))
        outside = {node.op_type for model in models for node in model.graph.node}
        advice = (
            f"Set scheme: {STATIC_SCHEME}, which quantizes Conv."
            if "Conv" in outside and not settings.uses_calibration
            else "Remove this step."
        )
        ctx.warn(
            "nothing-quantized",
            f"Nothing was quantized: {settings.scheme} does not support the operators of this graph"
            f" ({', '.join(list(operators)[:6])}), or none has constant weights. {advice}",
        )
    elif not settings.uses_calibration and (float_message := float_matrices_message(models)) is not None:
        ctx.warn(
            "matrices-kept-float",
            f"{float_message}. ONNX Runtime does not quantize their operators, or convolutions inside If,"
            " Loop and Scan.",
        )
    ctx.details.update(nodes=operators.total(), operators=dict(operators.most_common()))
    before, after = (sum(graph_bytes(folder / path.name) for path in paths) for folder in (src.path, ctx.out))
    if after > before + _SLACK_BYTES:
        ctx.warn(
            "larger-file",
            f"The quantized file is larger than the float one ({before:,} to {after:,} bytes):"
            " its weights are few beside the nodes that int8 adds. Remove this step.",
        )
