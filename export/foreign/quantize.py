"""The stage `quantize-onnx`: ONNX Runtime's quantizers on a graph of somebody else."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from smelt.core.artifact import Artifact, Format
from smelt.core.data import CUSTOM, EVERY_TASK, Task
from smelt.core.errors import InputError, RunError
from smelt.core.rows.arrays import Axes
from smelt.core.stage import Context, Need, Settings
from smelt.export.foreign.carry import carry, copy_graphs, graphs_in
from smelt.export.foreign.comparison import Comparison, require_near
from smelt.export.foreign.finished import finished
from smelt.export.foreign.normalize import nodes_of
from smelt.export.foreign.passed_through import put_back, take_out
from smelt.export.foreign.prepared import BY_OUTPUT, prepared
from smelt.export.foreign.quantize_settings import PRODUCTS, QuantizeOnnxSettings
from smelt.export.foreign.quantizer_names import apart, restore
from smelt.export.foreign.quantizers import quantize
from smelt.runtime.schemes.registry import DEFAULT, OBSERVING

_CODED = frozenset(
    {
        *("QuantizeLinear", "DequantizeLinear", "MatMulInteger", "DynamicQuantizeLinear", "ConvInteger"),
        *("DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QAttention", "QEmbedLayerNormalization"),
    }
)
_COMPARED = 64  # samples on which the quantized graph is compared with the float one
# Bytes of a float by its number in onnx.TensorProto: float, float16, double, bfloat16.
_BYTES = {1: 4, 10: 2, 11: 8, 16: 2}
_SHARE = 0.01  # of the bytes of all weights, below which a float matrix is not reported
_NAMED = 3


class QuantizeOnnx:
    """Quantize an ONNX model that somebody else exported to int8.

    ONNX Runtime's own quantizers, behind these settings. In a recipe that starts from an ONNX model the word
    `quantize` means this stage too. The quantized graph is run on rows of the data; how far it is from what
    it was stands in the report, as agreement and as parity.

        - quantize-onnx: {scheme: int8-dynamic}
        - quantize-onnx: {scheme: int8-static, calibration_method: entropy}
        - quantize-onnx: {scheme: int8-static, exclude: [/head/MatMul]}
    """

    name: ClassVar[str] = "quantize-onnx"
    accepts: ClassVar[frozenset[Format]] = frozenset({"onnx"})
    produces: ClassVar[Format] = "onnx"
    needs: ClassVar[frozenset[Need]] = frozenset({"calibration"})
    source: ClassVar[str] = (
        "onnxruntime.quantization, https://onnxruntime.ai/docs/performance/model-optimizations"
    )
    version: ClassVar[int] = 5
    foreign: ClassVar[bool] = True
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = QuantizeOnnxSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(EVERY_TASK)

    @classmethod
    def needs_with(cls, settings: QuantizeOnnxSettings, given: Any) -> frozenset[Need]:
        """Return calibration where ranges are found before, and no split may stand in for it."""
        if not settings.observes or set(given) & {"validation", "train"}:
            return frozenset()
        return frozenset({"calibration"})

    def __call__(self, src: Artifact, settings: QuantizeOnnxSettings, ctx: Context) -> None:
        """Write the quantized graph into `ctx.out`.

        Raises:
            InputError: `exclude` names a node that the graph has not.
            RunError: the quantizer fails, or ONNX Runtime cannot run its graph (`graph-crashes`).
            ParityError: its outputs are too far from those of the float graph (`quantization-error`).
        """
        from smelt.export.foreign.rows import require_one_graph, require_runs, rows_of
        from smelt.export.graph_files import read_graph
        from smelt.runtime.foreign.signature import row_axes_in

        require_one_graph(src, self.name)
        carry(src, ctx)
        paths = graphs_in(src)
        _require_nodes(paths, settings)
        before = [read_graph(path, values=False) for path in paths]
        products = {*PRODUCTS, *settings.op_types}
        if not any(node.op_type in products for model in before for node in nodes_of(model)):
            copy_graphs(src, ctx)  # trees, linear classifiers
            _tell(before, settings, ctx)
            return
        # samples of arrays have one shape, so that more of them at once only take more memory
        alone = settings.observes and src.manifest.task == CUSTOM
        feeds, real = rows_of(src, ctx, settings.calibration_samples, at_once=1 if alone else 4)
        axes = row_axes_in(src.path)
        found = Comparison(axes)
        for path in paths:
            fed = feeds[path.stem]
            _write_quantized(path, settings, fed, ctx)
            require_runs(ctx.out / path.name, fed)
            _compare(found, ctx.out / path.name, path, fed, ctx)
        _tell([read_graph(ctx.out / path.name, values=False) for path in paths], settings, ctx)
        found.note(ctx)
        if real:
            self._judge(found, paths, feeds, settings, ctx)
        else:
            ctx.warn(
                "made-up-inputs",
                "The quantized graph was compared on random inputs, because there is no data but test. Add"
                " data: {calibration: FILE}.",
            )
        ctx.details.update(scheme=settings.scheme, target=settings.target)

    @staticmethod
    def _judge(
        found: Comparison, paths: list[Path], feeds: Any, settings: QuantizeOnnxSettings, ctx: Context
    ) -> None:
        """Require that outputs are near those of the float graph, unless it gives others each time itself."""
        judge_classes = settings.max_difference is None
        noise = None
        if any(found.too_far(settings.limit, judge_classes)):
            noise = Comparison(found.axes)
            for path in paths:
                _repeat(noise, path, feeds[path.stem], ctx)
        require_near(found, settings.limit, judge_classes, _advice(settings), ctx, noise)


def _compare(found: Comparison, new: Path, old: Path, feeds: list[Any], ctx: Context) -> None:
    """Run both graphs on up to `_COMPARED` samples, spread over `feeds`."""
    from smelt.export.foreign.rows import outputs_of

    some = _some(feeds, found.axes)
    pairs = zip(outputs_of(new, some, ctx.threads), outputs_of(old, some, ctx.threads), strict=True)
    for fed, (got, wanted) in zip(some, pairs, strict=True):
        found.add(fed, got, wanted)


def _repeat(noise: Comparison, path: Path, feeds: list[Any], ctx: Context) -> None:
    """Run the float graph twice on the samples of `_compare`; outputs that are random differ."""
    from smelt.export.foreign.rows import outputs_of

    some = _some(feeds, noise.axes)
    found = outputs_of(path, [fed for one in some for fed in (one, one)], ctx.threads)
    for fed in some:
        noise.add(fed, next(found), next(found))


def _some(feeds: list[Any], axes: Axes) -> list[Any]:
    from smelt.export.foreign.rows import rows_in

    calls = max(1, _COMPARED // rows_in(feeds[0], axes))
    return feeds[:: max(1, -(-len(feeds) // calls))]


def _advice(settings: QuantizeOnnxSettings) -> str:
    """Return what a user can change to come nearer to the float graph."""
    ways = ["keep the nodes that need float32 in `exclude`"]
    if not settings.per_channel:
        ways.append("set per_channel: true")
    if settings.op_types:
        ways.append("remove `op_types`: matrix multiplications and convolutions alone are then quantized")
    if settings.observes:
        others = [name for name in ("minmax", "percentile", "entropy") if name != settings.calibration_method]
        ways += [
            f"try calibration_method: {others[0]}",
            "give more calibration samples, of the kind that the model gets",
        ]
        if settings.target == "ort-cpu":
            ways.append(f"take scheme: {DEFAULT}")
    return f"What helps: {'; '.join(ways)}."


def _write_quantized(path: Path, settings: QuantizeOnnxSettings, feeds: list[Any], ctx: Context) -> None:
    """Write what the quantizer makes of the graph in `path` into `ctx.out`.

    Raises:
        RunError: it fails.
    """
    from smelt.export.graph_files import write_graph
    from smelt.runtime.backends.onnx_session import quiet_runtime

    with TemporaryDirectory(dir=ctx.out.parent, prefix=".quantize-") as folder:
        made, ready_in, named_in = Path(folder, path.name), Path(folder, "prepared"), Path(folder, "named")
        ready_in.mkdir()
        named_in.mkdir()
        try:
            # it tells every caller that a graph may be prepared first, which `simplify` does
            logging.disable(logging.WARNING)
            source, passed = take_out(path, Path(folder, "passed"))
            ready, opset = prepared(source, ready_in)
            ready, names = apart(ready, named_in, settings.exclude)
            renamed = {before: after for after, before in names.items()}
            named = [{renamed.get(name, name): value for name, value in one.items()} for one in feeds]
            with quiet_runtime():
                quantize(ready, made, _of_one_scale(opset, settings, ctx), named, ctx)
            model = finished(made, ready)
            restore(model, names)
        except Exception as error:  # a library of many kinds of errors; none leaves a graph
            words = " ".join(str(error).split())[:400]
            raise RunError(
                f"onnxruntime.quantization failed on {path.name}: {words}", code="quantizer-failed"
            ) from error
        finally:
            logging.disable(logging.NOTSET)
        write_graph(put_back(model, passed), ctx.out / path.name)


def _of_one_scale(opset: int, settings: QuantizeOnnxSettings, ctx: Context) -> QuantizeOnnxSettings:
    """Return `settings` as the opset allows: its DequantizeLinear may know no scales by output."""
    if opset >= BY_OUTPUT or not settings.observes or not settings.per_channel:
        return settings
    ctx.warn(
        "per-tensor-weights",
        f"Weights have one scale per matrix: opset {opset} supports no scales per output, and onnx cannot"
        f" convert this model. Export it with opset {BY_OUTPUT} or newer.",
    )
    return settings.model_copy(update={"per_channel": False})


def _require_nodes(paths: list[Path], settings: QuantizeOnnxSettings) -> None:
    from smelt.core.errors import nearest
    from smelt.export.graph_files import read_graph

    graphs = [read_graph(path, values=False) for path in paths] if settings.exclude else []
    names = [node.name for graph in graphs for node in nodes_of(graph)]
    for name in settings.exclude:
        if name not in names:
            raise InputError(
                f"exclude: no node '{name[:80]}' in the graph.{nearest(name, names)}", code="unknown-node"
            )


def _tell(models: list[Any], settings: QuantizeOnnxSettings, ctx: Context) -> None:
    """Say what was quantized; where nothing was, why that may be."""
    operators = Counter(node.op_type for model in models for node in nodes_of(model))
    ctx.details.update(nodes=operators.total(), operators=dict(operators.most_common()))
    if _CODED & set(operators):
        left = None if settings.observes else float_matrices(models)
        if left is not None:
            ctx.warn(
                "matrices-kept-float",
                f"{left}; ONNX Runtime does not quantize their operators, or weights inside If, Loop and"
                " Scan.",
            )
        return
    more = f"; {OBSERVING} quantizes Conv" if "Conv" in operators and not settings.observes else ""
    ctx.warn(
        "nothing-quantized",
        f"Nothing is quantized: {settings.scheme} quantizes none of the operators"
        f" ({', '.join(list(operators)[:6])}), or none has constant weights as its second input{more}.",
    )


def float_matrices(models: Sequence[Any]) -> str | None:
    """Return the end of a warning about float matrices, the largest first; None where there are none.

    Args:
        models: onnx.ModelProto, without or with the values of their weights.
    """
    from smelt.runtime.foreign.structure import all_nodes, label
    from smelt.runtime.foreign.tensors import tensors_of

    readers: dict[str, str] = {}
    sizes: dict[str, int] = {}
    total = 0
    for model in models:
        for node in all_nodes(model.graph.node):
            for name in node.input:
                readers.setdefault(name, label(node))
        for tensor in tensors_of(model):
            size = math.prod(tensor.dims) * _BYTES.get(tensor.data_type, 1)
            total += size
            if tensor.data_type in _BYTES and sum(length > 1 for length in tensor.dims) > 1:
                sizes[tensor.name] = sizes.get(tensor.name, 0) + size
    large = {name: size for name, size in sizes.items() if size >= _SHARE * total and name in readers}
    if not large:
        return None
    worst = sorted(large, key=lambda name: -large[name])
    told = ", ".join(
        f"'{name[:80]}' of {readers[name]} ({_megabytes(large[name])})" for name in worst[:_NAMED]
    )
    more = f" and {len(worst) - _NAMED:,} more" if len(worst) > _NAMED else ""
    what = "1 matrix is" if len(large) == 1 else f"{len(large):,} matrices are"
    return f"{what} still float, {_megabytes(sum(large.values()))}: {told}{more}"


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.3g} MB"
