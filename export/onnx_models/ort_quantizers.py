"""Run ONNX Runtime's int8 quantizers with calibrated ranges and float nodes.

The range of each activation is calibrated on samples, as onnxruntime.quantization computes it. onnxruntime
keeps every activation of every sample until the last one, and requires all samples to have one shape. Here
samples are run twice: first for the minimum and maximum, then, if the method needs them, for histograms of
that range. That gives onnxruntime's histogram of all samples at once in the memory of one call. The
thresholds are computed by its own HistogramCollector.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from smelt.export.onnx_models.graph_samples import Feeds
from smelt.export.onnx_models.prepare_for_quantizer import (
    float_only_nodes,
    has_huge_values,
    masked_values,
    unfused_activations,
    unquantizable_nodes,
)
from smelt.export.onnx_models.settings import DYNAMIC_OPS, INT8_WEIGHTS, WEIGHTED_OPS, QuantizeOnnxSettings
from smelt.quantization.schemes.registry import DEFAULT_SCHEME
from smelt.runtimes.graph_walk import (
    all_nodes,
    content_key,
    iter_graphs,
    iter_initializers,
    node_inputs,
    subgraphs,
)
from smelt.stage import Context

CalibrationMethodName = Literal["minmax", "entropy", "percentile"]
# onnxruntime's own defaults (quantization/calibrate.py, create_calibrator).
_HISTOGRAM_BINS = {"entropy": 128, "percentile": 2048}
_LEVELS, _PERCENTILE = 128, 99.999


class ActivationCalibration:
    """The result of calibration.

    ranges: an onnxruntime TensorsData for the quantizer. huge: values without a range, because they were
    infinite or nearly so on the samples.
    """

    def __init__(self, ranges: Any, huge: set[str]) -> None:
        self.ranges, self.huge = ranges, huge


def calibrate_activations(
    path: Path,
    operators: Sequence[str],
    method: CalibrationMethodName,
    feeds: Sequence[Feeds],
    exclude: Collection[str],
    folder: Path,
) -> ActivationCalibration:
    """Return the calibration ranges of the inputs and outputs of nodes of `operators` in the graph `path`.

    Args:
        path: an ONNX file.
        operators: operator types.
        method: minmax, entropy or percentile.
        feeds: the samples, call by call; calls may have different shapes.
        exclude: values that need no range.
        folder: an empty one for files.
    """
    from onnxruntime.quantization import CalibrationMethod, TensorsData
    from onnxruntime.quantization.calibrate import HistogramCollector

    calls = _ActivationReader(path, operators, feeds, exclude, folder)
    ends: dict[str, tuple[Any, Any, Any]] = {}
    huge: set[str] = set()
    for name, values in calls:
        if has_huge_values(values):
            huge.add(name)
        elif values.size:
            ends[name] = _merge_ranges(ends.get(name), values)
    nothing = np.float32(0)
    pairs = {name: ends.get(name, (nothing,) * 3)[:2] for name in calls.names if name not in huge}
    kind = {
        "minmax": CalibrationMethod.MinMax, "entropy": CalibrationMethod.Entropy,
        "percentile": CalibrationMethod.Percentile,
    }[method]  # fmt: skip
    if method == "minmax" or not pairs:
        return ActivationCalibration(TensorsData(CalibrationMethod.MinMax, pairs), huge)
    absolute = method == "percentile"
    collector = HistogramCollector(method, absolute, _HISTOGRAM_BINS[method], _LEVELS, _PERCENTILE, "same")
    histograms = _histograms(calls, ends, _HISTOGRAM_BINS[method], absolute, huge)
    collector.histogram_dict = {
        name: (*histogram, *ends[name][:2], ends[name][2]) for name, histogram in histograms.items()
    }
    computed_ranges: dict[str, Any] = {}
    if histograms:
        with redirect_stdout(StringIO()):
            computed_ranges = collector.compute_collection_result()
    # constant values, and values too close to each other for bins, keep their minimum and maximum
    range_by_value = {
        name: computed_ranges.get(name, (*pair, np.zeros(1), np.zeros(1))) for name, pair in pairs.items()
    }
    return ActivationCalibration(TensorsData(kind, range_by_value), huge)


class _ActivationReader:
    """Run the graph call by call and yield each value by its name; can be iterated more than once."""

    def __init__(
        self, path: Path, operators: Sequence[str], feeds: Sequence[Feeds], but: Collection[str], folder: Path
    ) -> None:
        from onnxruntime.quantization import CalibrationMethod, create_calibrator

        from smelt.export.graph_files import MAX_INLINE_BYTES, graph_bytes

        calibrator = create_calibrator(
            path, list(operators), str(folder / "augmented.onnx"), CalibrationMethod.Percentile,
            use_external_data_format=graph_bytes(path) > MAX_INLINE_BYTES,
        )  # fmt: skip
        self.names = sorted(set(calibrator.tensors_to_calibrate) - set(but))
        self._session = calibrator.infer_session
        self._feeds = feeds

    def __iter__(self) -> Iterator[tuple[str, NDArray[Any]]]:
        from smelt.export.onnx_models.graph_samples import cast_feeds

        input_types = {item.name: item.type for item in self._session.get_inputs()}
        for feeds in self._feeds if self.names else ():
            inputs = cast_feeds(feeds, input_types)
            for name, value in zip(self.names, self._session.run(self.names, inputs), strict=True):
                yield name, value.ravel()


def _merge_ranges(before: tuple[Any, Any, Any] | None, values: NDArray[Any]) -> tuple[Any, Any, Any]:
    """Return the minimum, the maximum and the smallest magnitude; NaN is ignored."""
    if np.isnan(values).all():
        return before or (np.float32(0),) * 3
    low, high, smallest = np.nanmin(values), np.nanmax(values), np.nanmin(np.abs(values))
    return (
        (low, high, smallest) if before is None
        else (min(before[0], low), max(before[1], high), min(before[2], smallest))
    )  # fmt: skip


def _histograms(
    calls: _ActivationReader,
    ends: dict[str, tuple[Any, Any, Any]],
    bins: int,
    absolute: bool,
    huge: Collection[str],
) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Return counts and edges of the bins of each value, or of its magnitudes if `absolute`."""
    histograms: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
    narrow: set[str] = set()
    for name, values in calls:
        if name in huge or name in narrow or name not in ends:
            continue
        low, high, smallest = ends[name]
        max_magnitude = max(abs(low), abs(high))
        valid = values[~np.isnan(values)]
        try:
            counts, edges = np.histogram(
                np.abs(valid) if absolute else valid,
                bins,
                range=(smallest, max_magnitude) if absolute else (-max_magnitude, max_magnitude),
            )
        except ValueError:  # numpy: too many bins for the range, so nearly all values are equal
            narrow.add(name)
            histograms.pop(name, None)
            continue
        histograms[name] = (
            counts + histograms[name][0] if name in histograms else counts,
            edges.astype(np.float32),
        )
    return histograms


# Their outputs are rounded once less than those of a convolution: int8 consumers round their own inputs, and
# all others (sums, norms, activations) compute in float anyway. MiniLM: less error and not slower.
_FLOAT_OUTPUT_OPS = ("MatMul", "Gemm")
_MAX_NAMED = 5  # nodes in a warning
_MATRIX = 2  # dimensions


def run_ort_quantizer(
    source: Path,
    target: Path,
    settings: QuantizeOnnxSettings,
    calibrate: Callable[[Any], ActivationCalibration],
    ctx: Context,
) -> None:
    """Write the quantized graph of `source` as `target`.

    Args:
        source: a graph as `prepare_for_quantizer` returns it.
        target: in a folder for temporary files.
        settings: of the stage.
        calibrate: returns the activation ranges of the graph, an onnx.ModelProto.
        ctx: gets a warning of the nodes that remain float.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.quant_utils import load_model_with_shape_infer, update_opset_version

    from smelt.export.graph_files import MAX_INLINE_BYTES, graph_bytes

    size = graph_bytes(source)
    model = update_opset_version(load_model_with_shape_infer(source), QuantType.QInt8)
    value_kinds = _value_types(model.graph)
    float_nodes = float_only_nodes(model, value_kinds, settings.quantized_op_types)
    bodies = list(iter_graphs(model.graph))[1:]
    if settings.uses_calibration:
        float_nodes = unfused_activations(model.graph, settings.quantized_op_types) | float_nodes
        calibration = calibrate(model)
        for node_index, node in enumerate(model.graph.node):
            if node.op_type in settings.quantized_op_types and calibration.huge & {*node.input, *node.output}:
                float_nodes.setdefault(node_index, "unbounded values on the calibration samples")
        if settings.uses_qoperators:
            float_nodes = _without_qoperator(model.graph, settings) | float_nodes
        _warn_about_subgraphs(model.graph, bodies, settings, ctx)
        overrides = settings.is_per_channel and not settings.uses_qoperators  # which have no overrides
        single = _per_tensor_overrides(model, settings) if overrides else {}
        if single:
            ctx.warn(
                "per-tensor-weights",
                f"{len(single):,} weight{'s have' if len(single) > 1 else ' has'} one scale instead of one"
                " per channel, because ONNX Runtime does not support per-channel scales for batched"
                " matrices, constant first operands and grouped ConvTranspose with a bias.",
            )
        names = [*settings.exclude, *name_float_nodes(model.graph, float_nodes, ctx)]
        quantizer = _static_quantizer(model, calibration.ranges, names, settings)
        quantizer.quantize_model()
        quantizer.model.save_model_to_file(target, size > MAX_INLINE_BYTES)
        return
    vectors = {tensor.name for tensor in iter_initializers(model.graph) if len(tensor.dims) == 1}
    float_nodes |= _vector_products(model.graph, vectors, settings)
    names = [*settings.exclude, *name_float_nodes(model.graph, float_nodes, ctx)]
    empty = {tensor.name for tensor in model.graph.initializer if 0 in tensor.dims}
    lstm_weights: dict[str, tuple[str, str, str]] = {}
    for body in bodies:
        unquantizable = unquantizable_nodes(body, value_kinds, settings.quantized_op_types)
        unquantizable |= {i: "an empty weight" for i, node in enumerate(body.node) if empty & {*node.input}}
        unquantizable |= _vector_products(body, vectors, settings)
        names += name_float_nodes(body, unquantizable, ctx)
        if "LSTM" in settings.quantized_op_types:
            _quantize_inner_lstms(model, body, names, lstm_weights)
    quantize_dynamic(
        model if float_nodes or bodies else source, target, op_types_to_quantize=settings.quantized_op_types,
        per_channel=settings.is_per_channel,
        # Without VNNI int8 weights need x64quantprecision, which ONNX Runtime does not apply in inner graphs
        weight_type=QuantType.QUInt8 if bodies else QuantType.QInt8,
        nodes_to_exclude=[*names, *(f"{name}_MatMul" for name in names)],  # of a Gemm
        use_external_data_format=size > MAX_INLINE_BYTES,
        extra_options={"DefaultTensorType": 1, "EnableSubgraph": bool(bodies)},
    )  # fmt: skip


_MATRIX_DIMS = 2
_SIGNED_BITS = 63  # the largest value of 7 bits: without VNNI, sums of two products of 8 bits overflow


def _quantize_inner_lstms(
    model: Any, body: Any, exclude: Collection[str], quantized: dict[str, tuple[str, str, str]]
) -> None:
    """Replace each LSTM of an inner graph by DynamicQuantizeLSTM, with one scale per row of its matrices.

    ONNX Runtime's quantizer finds the weights of an LSTM only in the LSTM's own graph. `quantized`: the names
    of the new tensors by weight, to which this adds.
    """
    from onnx import TensorProto, helper

    weights = {t.name: t for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    for node in body.node:
        batch_first = any(attribute.name == "layout" and attribute.i for attribute in node.attribute)
        if node.op_type != "LSTM" or node.domain or node.name in exclude or batch_first:
            continue
        if any(name not in weights or len(weights[name].dims) != 3 for name in node.input[1:3]):
            continue
        for name in node.input[1:3]:
            if name not in quantized:
                quantized[name] = _quantize_lstm_weight(model.graph, weights[name])
        (values, *values_ends), (recurrent, *recurrent_ends) = (quantized[name] for name in node.input[1:3])
        others = [*node.input[3:], *[""] * (8 - len(node.input))]
        node.input[:] = [node.input[0], values, recurrent, *others, *values_ends, *recurrent_ends]
        node.op_type, node.domain = "DynamicQuantizeLSTM", "com.microsoft"
        attributes = [attribute for attribute in node.attribute if attribute.name != "layout"]
        del node.attribute[:]
        node.attribute.extend(attributes)
        if all(opset.domain != node.domain for opset in model.opset_import):
            model.opset_import.append(helper.make_opsetid(node.domain, 1))


def _quantize_lstm_weight(graph: Any, weight: Any) -> tuple[str, str, str]:
    """Add int8 [D, I, 4H], scales and zero points [D, 4H] of an LSTM's weight [D, 4H, I]; return names."""
    from onnx import numpy_helper

    values = numpy_helper.to_array(weight)
    used_names = {name for node in all_nodes(graph.node) for name in (*node.input, *node.output)}
    used_names |= {value.name for value in (*graph.input, *graph.initializer)}
    prefix = f"{weight.name}.int8"
    while any(name.startswith(prefix) for name in used_names):
        prefix += "_"
    names = (prefix, f"{prefix}.scale", f"{prefix}.zero")
    largest = np.abs(values).max(axis=2, initial=0)
    scale = np.where(largest > 0, largest, 1) / np.float32(_SIGNED_BITS)
    q_weight = np.rint(values / scale[..., None]).astype(np.int8).transpose(0, 2, 1)
    tensors: tuple[NDArray[Any], ...]
    tensors = (np.ascontiguousarray(q_weight), scale.astype(np.float32), np.zeros(scale.shape, np.int8))
    graph.initializer.extend(numpy_helper.from_array(v, n) for v, n in zip(tensors, names, strict=True))
    return names


def _without_qoperator(graph: Any, settings: QuantizeOnnxSettings) -> dict[int, str]:
    """Return the indices of nodes for which ONNX Runtime 1.31 has no QLinear operator, with the reason."""
    stacked = {tensor.name for tensor in graph.initializer if len(tensor.dims) != _MATRIX_DIMS}
    read_inside = {name for node in graph.node if subgraphs(node) for name in node_inputs(node)}
    reasons: dict[int, str] = {}
    for index, node in enumerate(graph.node):
        if node.op_type not in settings.quantized_op_types:
            continue
        if node.op_type == "ConvTranspose":
            reasons[index] = "no QLinear operator"
        elif node.op_type == "MatMul" and stacked & {*node.input}:
            reasons[index] = "QLinearMatMul has no scales of a stack of matrices or of a vector"
        elif read_inside & {*node.output}:
            reasons[index] = "read inside If, Loop or Scan"
    return reasons


def _vector_products(graph: Any, vectors: Collection[str], settings: QuantizeOnnxSettings) -> dict[int, str]:
    """Return the indices of the MatMul by a constant vector, which ONNX Runtime's int8 operators reject."""
    if "MatMul" not in settings.quantized_op_types:
        return {}
    return {
        index: "a vector as its weight"
        for index, node in enumerate(graph.node)
        if node.op_type == "MatMul" and node.input[1] in vectors
    }


def _value_types(graph: Any) -> dict[str, int]:
    """Return the type of each value whose type is known, as an onnx.TensorProto number."""
    values = (*graph.value_info, *graph.input, *graph.output)
    value_kinds = {value.name: value.type.tensor_type.elem_type for value in values}
    return value_kinds | {tensor.name: tensor.data_type for tensor in graph.initializer}


def calibrate_graph(
    source: Path, model: Any, settings: QuantizeOnnxSettings, feeds: list[Any], folder: Path
) -> ActivationCalibration:
    """Return the ranges of the activations of the graph `source`, which was read as `model`, on `feeds`."""
    from onnx import TensorProto

    non_float = {name for name, kind in _value_types(model.graph).items() if kind != TensorProto.FLOAT}
    with TemporaryDirectory(dir=folder) as temporary:
        but = masked_values(model.graph) | non_float
        return calibrate_activations(
            source, settings.quantized_op_types, settings.calibration_method, feeds, but, Path(temporary)
        )


def _warn_about_subgraphs(
    graph: Any, bodies: list[Any], settings: QuantizeOnnxSettings, ctx: Context
) -> None:
    """Warn about weights of inner graphs, which static quantization leaves in float."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    nodes = [node for body in bodies for node in body.node if node.op_type in WEIGHTED_OPS]
    readers = [(node, tensors[name]) for node in nodes for name in node.input if name in tensors]
    weights = {content_key(tensor): 4 * math.prod(tensor.dims) for _, tensor in readers}  # shared ones once
    if weights:
        dynamic = {content_key(tensor) for node, tensor in readers if node.op_type in DYNAMIC_OPS}
        count, total = len(weights), sum(weights.values()) / 1e6
        advice = f" scheme: {DEFAULT_SCHEME} quantizes {len(dynamic):,} of them;" if dynamic else ""
        ctx.warn(
            "weights-kept-float",
            f"{count:,} weight{'s remain' if count > 1 else ' remains'} float ({total:.2g} MB): they"
            f" are used inside If, Loop or Scan, where activations cannot be calibrated.{advice}"
            f" scheme: {INT8_WEIGHTS} stores their weights in int8.",
        )


def _per_tensor_overrides(model: Any, settings: QuantizeOnnxSettings) -> dict[str, list[dict[str, Any]]]:
    """Return overrides for the weights that get a single scale, as ONNX Runtime requires.

    These are stacks of matrices, first operands, whose outputs are their rows, and weights of a ConvTranspose
    in groups with a bias: its scales are those of one group's outputs, but the bias has those of all groups.
    """
    from onnxruntime.quantization import QuantType

    ranks = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    names = {node.input[0] for node in products if node.input[0] in ranks}
    names |= {name for node in products for name in node.input if ranks.get(name, 0) > _MATRIX}
    names |= {
        node.input[1]
        for node in model.graph.node
        if node.op_type in settings.quantized_op_types
        and node.op_type == "ConvTranspose"
        and node.input[1] in ranks
        and node.input[2:3] not in ([], [""])
        and any(attribute.name == "group" and attribute.i > 1 for attribute in node.attribute)
    }
    return {name: [{"quant_type": QuantType.QInt8}] for name in sorted(names)}


def name_float_nodes(graph: Any, reasons: Mapping[int, str], ctx: Context) -> list[str]:
    """Return the names of the nodes at the indices `reasons`, giving them unique names; warn about them."""
    if not reasons:
        return []
    times = Counter(node.name for node in graph.node)
    for node_index in reasons:
        if times[graph.node[node_index].name] > 1 or not graph.node[node_index].name:
            name = f"{graph.node[node_index].op_type}_{node_index}"
            while name in times:
                name += "_"
            graph.node[node_index].name = name
            times[name] += 1
    node_names = [graph.node[node_index].name for node_index in reasons]
    node_texts = ", ".join(
        f"{graph.node[node_index].name} ({reason})"
        for node_index, reason in list(reasons.items())[:_MAX_NAMED]
    )
    more_text = f" and {len(reasons) - _MAX_NAMED:,} more" if len(reasons) > _MAX_NAMED else ""
    ctx.warn(
        "nodes-kept-float",
        f"{len(reasons):,} node{'s remain' if len(reasons) > 1 else ' remains'} float: "
        f"{node_texts}{more_text}.",
    )
    return node_names


def _static_quantizer(model: Any, ranges: Any, exclude: list[str], settings: QuantizeOnnxSettings) -> Any:
    """Return onnxruntime's quantizer, which `quantize_static` runs after its own calibration."""
    from onnxruntime.quantization import QDQQuantizer, QuantizationMode, QuantType
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer

    symmetric = settings.target == "tensorrt"
    types = QuantType.QInt8, QuantType.QInt8 if symmetric else QuantType.QUInt8
    operators = settings.quantized_op_types
    options: dict[str, Any] = {
        "ActivationSymmetric": symmetric, "WeightSymmetric": True, "DefaultTensorType": 1,
        "QuantizeBias": not symmetric,  # TensorRT does not support int32 biases
    }  # fmt: skip
    if settings.uses_qoperators:
        mode = QuantizationMode.QLinearOps
        return ONNXQuantizer(
            model, settings.is_per_channel, False, mode, True, *types, ranges, [], exclude, operators, options
        )
    options |= {
        "TensorQuantOverrides": _per_tensor_overrides(model, settings),
        "OpTypesToExcludeOutputQuantization": list(_FLOAT_OUTPUT_OPS),
    }
    return QDQQuantizer(
        model, settings.is_per_channel, False, *types, ranges, [], exclude, operators, options
    )
