"""The stage `quantize-graph`: ONNX Runtime's quantizers on a graph of somebody else."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from smelt.core.artifact import Artifact, Format
from smelt.core.data import EVERY_TASK, Task
from smelt.core.errors import InputError, RunError
from smelt.core.stage import Context, Need, Settings
from smelt.export.foreign.carry import carry, copy_graphs, graphs_in
from smelt.export.foreign.prepared import BY_OUTPUT, prepared
from smelt.runtime.schemes.registry import DEFAULT, OBSERVING, OF_GRAPHS, find

if TYPE_CHECKING:
    GraphScheme = str
else:
    GraphScheme = Literal[OF_GRAPHS]

# Conv would become ConvInteger, which computes in one thread and, of int8 weights, not at all on the CPU.
_DYNAMIC = ("MatMul", "Gemm", "Attention", "LSTM", "EmbedLayerNormalization", "Gather")
_CODED = frozenset(
    {
        *("QuantizeLinear", "DequantizeLinear", "MatMulInteger", "DynamicQuantizeLinear", "ConvInteger"),
        *("DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QAttention", "QEmbedLayerNormalization"),
    }
)
# Others (norms, masks, softmax) lose more than they gain: a real model agreed by 17.9 % with all of them.
_STATIC = ("Conv", "MatMul", "Gemm")


class QuantizeGraphSettings(Settings):
    """Settings of `quantize-graph`.

    scheme: int8-dynamic, ranges of activations found while it runs; int8-static, found before on calibration
    rows, which convolutions need. method: of int8-static: how a range is chosen from what was seen. rows: of
    the calibration data (else validation, train) that are looked at. per_channel: weights have a scale for
    each output. target: of int8-static: ort-cpu, activations as uint8; tensorrt, all of it symmetric int8,
    biases in float. operators: which to quantize; none: of int8-static Conv, MatMul and Gemm, of int8-dynamic
    all that it can but Conv. leave: names of nodes that stay as they are.
    """

    scheme: GraphScheme = DEFAULT
    method: Literal["minmax", "entropy", "percentile"] = "minmax"
    rows: int = Field(default=128, ge=1, le=100_000)
    per_channel: bool = True
    target: Literal["ort-cpu", "tensorrt"] = "ort-cpu"
    operators: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.observes and self.method != "minmax":
            raise ValueError(
                f"method is how {OBSERVING} chooses ranges; {self.scheme} finds them while it runs"
            )
        if self.target in find(self.scheme).refused:
            raise ValueError(f"TensorRT has no dynamic ranges; set scheme: {OBSERVING}")
        return self

    @property
    def observes(self) -> bool:
        """Whether ranges are found before, on rows of data."""
        return find(self.scheme).observes


class QuantizeGraph:
    """Quantize an ONNX model that somebody else exported to int8.

    ONNX Runtime's own quantizers, behind these settings. In a recipe that starts from an ONNX model the word
    `quantize` means this stage too. The quantized graph is run on rows of the data; how far it is from what
    it was stands in the report, as agreement and as parity.

        - quantize-graph: {scheme: int8-dynamic}
        - quantize-graph: {scheme: int8-static, method: entropy, rows: 256}
        - quantize-graph: {scheme: int8-static, leave: [/head/MatMul]}
    """

    name: ClassVar[str] = "quantize-graph"
    accepts: ClassVar[frozenset[Format]] = frozenset({"onnx"})
    produces: ClassVar[Format] = "onnx"
    needs: ClassVar[frozenset[Need]] = frozenset({"calibration"})
    source: ClassVar[str] = (
        "onnxruntime.quantization, https://onnxruntime.ai/docs/performance/model-optimizations"
    )
    version: ClassVar[int] = 3
    foreign: ClassVar[bool] = True
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[Settings]] = QuantizeGraphSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(EVERY_TASK)

    @classmethod
    def needs_with(cls, settings: QuantizeGraphSettings, given: Any) -> frozenset[Need]:
        """Return calibration where ranges are found before, and no split may stand in for it."""
        if not settings.observes or set(given) & {"validation", "train"}:
            return frozenset()
        return frozenset({"calibration"})

    def __call__(self, src: Artifact, settings: QuantizeGraphSettings, ctx: Context) -> None:
        """Write the quantized graph into `ctx.out`.

        Raises:
            InputError: `leave` names a node that the graph has not.
            RunError: the quantizer fails, or ONNX Runtime cannot run its graph (`graph-crashes`).
        """
        from smelt.export.foreign.rows import note_parity, require_one_graph, require_runs, rows_of, run_graph
        from smelt.export.graph_files import read_graph

        require_one_graph(src, self.name)
        carry(src, ctx)
        paths = graphs_in(src)
        _require_nodes(paths, settings)
        before = [read_graph(path, values=False) for path in paths]
        products = {*_DYNAMIC, "Conv", "ConvTranspose", *settings.operators}
        if not any(node.op_type in products for model in before for node in model.graph.node):
            copy_graphs(src, ctx)  # trees, linear classifiers
            _tell(before, settings, ctx)
            return
        feeds, real = rows_of(src, ctx, settings.rows, at_once=1 if settings.observes else 4)
        got, wanted, some = [], [], []
        for path in paths:
            fed = feeds[path.stem]
            _write_quantized(path, settings, fed, ctx)
            some += fed[:16]
            require_runs(ctx.out / path.name, fed)
            got += run_graph(ctx.out / path.name, fed[:16], ctx.threads)
            wanted += run_graph(path, fed[:16], ctx.threads)
        _tell([read_graph(ctx.out / path.name, values=False) for path in paths], settings, ctx)
        note_parity(ctx, some, got, wanted)
        if not real:
            ctx.warn(
                "made-up-inputs", "the quantized graph was tried on made-up rows: there are none but test"
            )
        ctx.facts.update(scheme=settings.scheme, target=settings.target)


def _write_quantized(path: Path, settings: QuantizeGraphSettings, feeds: list[Any], ctx: Context) -> None:
    """Write what the quantizer makes of the graph in `path` into `ctx.out`.

    Raises:
        RunError: it fails.
    """
    from smelt.export.graph_files import read_graph, write_graph

    with TemporaryDirectory(dir=ctx.out.parent, prefix=".quantize-") as folder:
        made, apart = Path(folder, path.name), Path(folder, "apart")
        apart.mkdir()
        try:
            # it tells every caller that a graph may be prepared first, which `simplify` does
            logging.disable(logging.WARNING)
            ready, opset = prepared(path, apart)
            _quantize(ready, made, _of_one_scale(opset, settings, ctx), feeds)
        except Exception as error:  # a library of many kinds of errors; none leaves a graph
            words = " ".join(str(error).split())[:400]
            raise RunError(f"onnxruntime.quantization failed on {path.name}: {words}") from error
        finally:
            logging.disable(logging.NOTSET)
        write_graph(read_graph(made), ctx.out / path.name)


def _of_one_scale(opset: int, settings: QuantizeGraphSettings, ctx: Context) -> QuantizeGraphSettings:
    """Return `settings` as the opset allows: its DequantizeLinear may know no scales by output."""
    if opset >= BY_OUTPUT or not settings.observes or not settings.per_channel:
        return settings
    ctx.warn(
        "per-tensor-weights",
        f"weights have one scale for a matrix, since operators of opset {opset} know no more, and onnx does"
        f" not convert this model; export it with opset {BY_OUTPUT} or newer, and each output gets a scale of"
        " its own",
    )
    return settings.model_copy(update={"per_channel": False})


def _require_nodes(paths: list[Path], settings: QuantizeGraphSettings) -> None:
    from smelt.core.errors import nearest
    from smelt.export.graph_files import read_graph

    graphs = [read_graph(path, values=False).graph for path in paths] if settings.leave else []
    names = [node.name for graph in graphs for node in graph.node]
    for name in settings.leave:
        if name not in names:
            raise InputError(f"leave: no node '{name[:80]}' in the graph.{nearest(name, names)}")


def _quantize(source: Path, target: Path, settings: QuantizeGraphSettings, feeds: list[Any]) -> None:
    """Write the quantized graph as `target`."""
    from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_dynamic, quantize_static

    from smelt.export.graph_files import LARGEST_INLINE, data_file

    both = (path.stat().st_size for path in (source, data_file(source)) if path.is_file())
    common: dict[str, Any] = {
        "per_channel": settings.per_channel,
        "nodes_to_exclude": list(settings.leave),
        "weight_type": QuantType.QInt8,
        "use_external_data_format": sum(both) > LARGEST_INLINE,
    }
    if not settings.observes:
        quantize_dynamic(
            source, target, op_types_to_quantize=list(settings.operators or _DYNAMIC),
            extra_options={"DefaultTensorType": 1}, **common,
        )  # fmt: skip
        return
    symmetric = settings.target == "tensorrt"
    quantize_static(
        source, target, _Reader(source, feeds),
        op_types_to_quantize=list(settings.operators or _STATIC),
        activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
        calibrate_method={
            "minmax": CalibrationMethod.MinMax, "entropy": CalibrationMethod.Entropy,
            "percentile": CalibrationMethod.Percentile,
        }[settings.method],
        extra_options={
            "ActivationSymmetric": symmetric, "WeightSymmetric": True, "DefaultTensorType": 1,
            "QuantizeBias": not symmetric,  # TensorRT takes no int32 biases
        },
        **common,
    )  # fmt: skip


class _Reader:
    """Gives the calibrator one call after another, as onnxruntime's CalibrationDataReader does."""

    def __init__(self, graph: Path, feeds: list[Any]) -> None:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
        self._kinds = {item.name: item.type for item in session.get_inputs()}
        self._feeds = feeds
        self._at = 0

    def get_next(self) -> Any:
        """Return what the next call is fed; None at the end."""
        from smelt.export.foreign.rows import fitting

        self._at += 1
        return fitting(self._feeds[self._at - 1], self._kinds) if self._at <= len(self._feeds) else None

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> Any:
        found = self.get_next()
        if found is None:
            raise StopIteration
        return found

    def __len__(self) -> int:
        return len(self._feeds)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Begin anew at a call."""
        self._at = start_index


def _tell(models: list[Any], settings: QuantizeGraphSettings, ctx: Context) -> None:
    """Say what was quantized; where nothing was, why that may be."""
    operators = Counter(node.op_type for model in models for node in model.graph.node)
    ctx.facts.update(nodes=operators.total(), operators=dict(operators.most_common()))
    if _CODED & set(operators):
        return
    more = f"; {OBSERVING} quantizes Conv" if "Conv" in operators and not settings.observes else ""
    ctx.warn(
        "nothing-quantized",
        f"nothing was quantized: none of its operators ({', '.join(list(operators)[:6])}) is one that"
        f" {settings.scheme} quantizes, or none has constant weights{more}.",
    )
