"""The stage `quantize-onnx`: quantize third-party graphs and compare them with the float ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from smelt.core.artifact import Artifact, Format
from smelt.core.errors import InputError
from smelt.core.messages import Message
from smelt.data.tasks import GRAPH_TASKS, Task, task_traits
from smelt.export.batch_dependence import DEPENDS_ON_BATCH, depends_on_batch
from smelt.export.onnx_models.graph_quantizer import GraphQuantizer
from smelt.export.onnx_models.normalize_graph import (
    copy_graphs,
    copy_model_files,
    inline_functions,
    iter_model_nodes,
    match_nodes,
    ordered_graphs,
)
from smelt.export.onnx_models.output_comparison import (
    OutputComparison,
    compare_graphs,
    measure_noise,
    require_close,
)
from smelt.export.onnx_models.sensitive_nodes import nodes_to_exclude
from smelt.export.onnx_models.settings import (
    AUTO,
    INT8_WEIGHTS,
    WEIGHT_ONLY_OPS,
    WEIGHTED_OPS,
    QuantizeOnnxSettings,
)
from smelt.models.model_size import SizeInputs, StepSize, one_shot_size
from smelt.quantization.schemes.registry import DEFAULT_SCHEME, STATIC_SCHEME
from smelt.runtimes.graph_walk import content_key, external_data_fields, is_external, iter_model_tensors
from smelt.runtimes.onnx_import.float_matrices import float_matrices_message
from smelt.runtimes.onnx_import.graph_files import QUANTIZED_DTYPES
from smelt.stage import Context, Need, Settings, Stage

_QUANTIZED_OPS = frozenset(
    {
        *("QuantizeLinear", "DequantizeLinear", "MatMulInteger", "DynamicQuantizeLinear", "ConvInteger"),
        *("DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QAttention", "QEmbedLayerNormalization"),
        "MatMulNBits",
    }
)
_MATRIX_AXES = 2
_SLACK_BYTES = 100_000  # for the nodes that int8 adds to a small graph

_SCALE_BYTES, _SCALE_SHARE = 4, 0.05  # of a block; bytes per weight where an output has one scale


class QuantizeOnnx(Stage[QuantizeOnnxSettings]):
    """Quantize a third-party ONNX model to int8, or only its weights to int8 or 4 bits.

    ONNX Runtime's quantizers, with the settings below. In a recipe that starts
    from an ONNX model, `quantize` means this stage too. The quantized graph is
    run on samples of the data; its difference from the float graph is reported
    as agreement and parity.

        - quantize-onnx: {scheme: int8-dynamic}
        - quantize-onnx: {scheme: int8-static, calibration_method: entropy}
        - quantize-onnx: {scheme: int8-static, exclude: [/head/MatMul, /pooler/*]}
        - quantize-onnx: {scheme: int8-weight-only, exclude: auto}
    """

    name: ClassVar[str] = "quantize-onnx"
    accepts: ClassVar[frozenset[Format]] = frozenset({"onnx"})
    produces: ClassVar[Format] = "onnx"
    may_need: ClassVar[frozenset[Need]] = frozenset({"calibration"})
    source: ClassVar[str] = (
        "onnxruntime.quantization, https://onnxruntime.ai/docs/performance/model-optimizations"
    )
    version: ClassVar[int] = 9
    imported_only: ClassVar[bool] = True
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = QuantizeOnnxSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(GRAPH_TASKS)

    @classmethod
    def needs_with(cls, settings: QuantizeOnnxSettings, available: Collection[str] = ()) -> frozenset[Need]:
        """Return calibration if ranges are calibrated; no split may replace it."""
        if not settings.uses_calibration or set(available) & {"validation", "train"}:
            return frozenset()
        return frozenset({"calibration"})

    @classmethod
    def check_graph(cls, settings: QuantizeOnnxSettings, graph: Path) -> list[Message]:
        """Return an error if `exclude` names a node that the graph does not have."""
        try:
            _expand_exclude([graph], settings)
        except InputError as error:
            return [error.as_message()]
        return []

    @classmethod
    def estimate_size(cls, settings: QuantizeOnnxSettings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step."""
        scales = _SCALE_BYTES / settings.block_size if settings.block_size else _SCALE_SHARE
        size = settings.bits / 8 + scales
        result = inputs.source.stored_as(size, size)
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
            with TemporaryDirectory(dir=ctx.out.parent, prefix=".quantize-") as folder:
                quantizer = GraphQuantizer(path, settings, graph_feeds, Path(folder), ctx)
                exclude = settings.exclude
                if AUTO in exclude:
                    exclude = nodes_to_exclude(quantizer, graph_feeds, axes, ctx)
                quantizer.write(ctx.out / path.name, exclude, ctx)
            require_runnable(ctx.out / path.name, graph_feeds)
            compare_graphs(comparison, ctx.out / path.name, path, graph_feeds, ctx.threads)
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
                measure_noise(noise, path, feeds[path.stem], ctx.threads)
        require_close(comparison, settings.difference_limit, judge_classes, _advice(settings), ctx, noise)


def _advice(settings: QuantizeOnnxSettings) -> str:
    """Return what a user can change to reduce the error."""
    suggestions = ["add nodes that need float32 to `exclude`"]
    if not settings.is_per_channel:
        suggestions.append("set granularity: channel")
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


def _expand_exclude(paths: list[Path], settings: QuantizeOnnxSettings) -> QuantizeOnnxSettings:
    """Return `settings` with the names of the nodes that the patterns of `exclude` match."""
    from smelt.export.graph_files import read_graph

    if {*settings.exclude} <= {AUTO}:
        return settings
    graphs = [read_graph(path, values=False) for path in paths]
    graphs = [
        inline_functions(path) if graph.functions else graph
        for path, graph in zip(paths, graphs, strict=True)
    ]
    names = [node.name for graph in graphs for node in iter_model_nodes(graph) if node.name]
    patterns = [pattern for pattern in settings.exclude if pattern != AUTO]
    excluded = match_nodes(patterns, names, "exclude")
    automatic = [AUTO] if AUTO in settings.exclude else []
    return settings.model_copy(update={"exclude": (*excluded, *automatic)})


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
        alternatives = {
            f"scheme: {STATIC_SCHEME}, which quantizes Conv": "Conv" in outside
            and not settings.uses_calibration,
            f"scheme: {INT8_WEIGHTS}, for a smaller file": not settings.is_weight_only
            and not {*WEIGHT_ONLY_OPS}.isdisjoint(operators),
        }
        useful = [text for text, applies in alternatives.items() if applies]
        advice = f"Set {' or '.join(useful)}." if useful else "Remove this step."
        if settings.exclude:
            reason = "`exclude` keeps all of its nodes float"
        elif {*settings.quantized_op_types} & {*operators}:
            reason = "no matrix would become smaller, or none is constant"
        else:
            weighted = ", ".join(name for name in WEIGHT_ONLY_OPS if name in operators) or "other operators"
            kinds = ", ".join(settings.quantized_op_types)
            reason = f"{settings.scheme} is for {kinds}; this graph's weights are in {weighted}"
        ctx.warn("nothing-quantized", f"Nothing was quantized: {reason}. {advice}")
    elif (
        not settings.uses_calibration
        and AUTO not in settings.exclude  # which has a warning of its own
        and (float_message := float_matrices_message(models)) is not None
    ):
        reason = (
            f"{settings.scheme} does not quantize their operators."
            if settings.is_weight_only
            else "ONNX Runtime has no int8 operators for them, or for convolutions inside If, Loop and Scan."
            f" scheme: {INT8_WEIGHTS} stores the weights of {', '.join(WEIGHT_ONLY_OPS)} in int8."
        )
        ctx.warn("matrices-kept-float", f"{float_message}. {reason}")
    ctx.details.update(nodes=operators.total(), operators=dict(operators.most_common()))
    ctx.details[DEPENDS_ON_BATCH] = any(map(depends_on_batch, models))
    before, after = (sum(graph_bytes(folder / path.name) for path in paths) for folder in (src.path, ctx.out))
    if after > before + _SLACK_BYTES:
        float_models = [read_graph(path, values=False) for path in paths]
        changes = stored_bytes(models, after)
        changes.subtract(stored_bytes(float_models, before))
        causes = "; ".join(f"{part} {change:+,}" for part, change in changes.most_common() if change)
        ctx.warn(
            "larger-file",
            f"The quantized file is larger than the float one ({before:,} to {after:,} bytes; change by part:"
            f" {causes}). Remove this step.",
        )


def stored_bytes(models: Iterable[Any], total: int) -> Counter[str]:
    """Return the bytes of graph files by what they hold.

    Args:
        models: onnx.ModelProto, as read with or without external weights.
        total: bytes of the files.
    """
    sizes: Counter[str] = Counter()
    keys: set[bytes] = set()
    for tensor in (tensor for model in models for tensor in iter_model_tensors(model)):
        external, key = is_external(tensor), content_key(tensor)
        if sum(length > 1 for length in tensor.dims) < _MATRIX_AXES or (external and key in keys):
            continue  # small, or the same bytes of the data file
        part = "integer weights" if tensor.data_type in QUANTIZED_DTYPES else "float weights"
        size = int(external_data_fields(tensor)["length"]) if external else tensor.ByteSize()
        sizes["copies of equal weights" if key in keys else part] += size
        keys.add(key)
    sizes["nodes and small tensors"] = total - sizes.total()
    return sizes
