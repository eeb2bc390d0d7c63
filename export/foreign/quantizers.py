"""ONNX Runtime's quantizers, with the nodes that must stay float and the ranges that calibration found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from smelt.core.stage import Context
from smelt.export.foreign.calibrate import Calibration, calibrate
from smelt.export.foreign.float_nodes import float_nodes, masked_values, standing_nodes, unfit_nodes
from smelt.export.foreign.quantize_settings import QuantizeOnnxSettings
from smelt.export.precision.types import graphs_of
from smelt.runtime.schemes.registry import DEFAULT

# Their outputs are rounded once less than those of a convolution: what reads them in int8 rounds its inputs,
# all others (sums, norms, activations) compute in float anyway. MiniLM: less error and not slower.
_FLOAT_OUTPUT = ("MatMul", "Gemm")
_NAMED = 5  # nodes in a warning
_MATRIX = 2  # dimensions


def quantize(
    source: Path, target: Path, settings: QuantizeOnnxSettings, feeds: list[Any], ctx: Context
) -> None:
    """Write the quantized graph of `source` as `target`.

    Args:
        source: a graph as `prepared` returns it.
        target: in a folder for temporary files.
        settings: of the stage.
        feeds: calibration samples, call by call.
        ctx: gets a warning of the nodes that stay float.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.quant_utils import load_model_with_shape_infer, update_opset_version

    from smelt.export.graph_files import LARGEST_INLINE, data_file

    size = sum(file.stat().st_size for file in (source, data_file(source)) if file.is_file())
    model = update_opset_version(load_model_with_shape_infer(source), QuantType.QInt8)
    kinds = _kinds(model.graph)
    kept = float_nodes(model, kinds, settings.quantized_op_types)
    bodies = list(graphs_of(model.graph))[1:]
    if settings.observes:
        kept = standing_nodes(model.graph, settings.quantized_op_types) | kept
        found = _calibrated(source, model, kinds, settings, feeds, target.parent)
        for at, node in enumerate(model.graph.node):
            if node.op_type in settings.quantized_op_types and found.huge & {*node.input, *node.output}:
                kept.setdefault(at, "values without bounds on the calibration samples")
        _warn_of_bodies(model.graph, bodies, settings, ctx)
        single = _of_one_scale(model) if settings.per_channel else {}
        if single:
            ctx.warn(
                "per-tensor-weights",
                f"{len(single):,} weight{'s have' if len(single) > 1 else ' has'} one scale instead of one"
                " per output: ONNX Runtime supports no more for stacks of matrices and constant first"
                " operands.",
            )
        names = [*settings.exclude, *_named(model.graph, kept, ctx)]
        quantizer = _static(model, found.ranges, names, settings)
        quantizer.quantize_model()
        quantizer.model.save_model_to_file(target, size > LARGEST_INLINE)
        return
    names = [*settings.exclude, *_named(model.graph, kept, ctx)]
    for body in bodies:
        unfit = unfit_nodes(body, kinds, settings.quantized_op_types)
        # of an LSTM the quantizer finds no weights that lie in a graph around its own
        unfit |= {
            at: "inside of If, Loop or Scan" for at, one in enumerate(body.node) if one.op_type == "LSTM"
        }
        names += _named(body, unfit, ctx)
    quantize_dynamic(
        model if kept or bodies else source, target, op_types_to_quantize=settings.quantized_op_types,
        per_channel=settings.per_channel, weight_type=QuantType.QInt8,
        nodes_to_exclude=[*names, *(f"{name}_MatMul" for name in names)],  # what it makes of a Gemm
        use_external_data_format=size > LARGEST_INLINE,
        extra_options={"DefaultTensorType": 1, "EnableSubgraph": bool(bodies)},
    )  # fmt: skip


def _kinds(graph: Any) -> dict[str, int]:
    """Return the type of each value that has a known one, as onnx.TensorProto numbers it."""
    values = (*graph.value_info, *graph.input, *graph.output)
    kinds = {value.name: value.type.tensor_type.elem_type for value in values}
    return kinds | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _calibrated(
    source: Path, model: Any, kinds: Mapping[str, int], settings: QuantizeOnnxSettings, feeds: list[Any],
    folder: Path,
) -> Calibration:  # fmt: skip
    from onnx import TensorProto

    wide = {name for name, kind in kinds.items() if kind != TensorProto.FLOAT}
    with TemporaryDirectory(dir=folder) as apart:
        but = masked_values(model.graph) | wide
        return calibrate(
            source, settings.quantized_op_types, settings.calibration_method, feeds, but, Path(apart)
        )


def _warn_of_bodies(graph: Any, bodies: list[Any], settings: QuantizeOnnxSettings, ctx: Context) -> None:
    """Warn of the weights that inner graphs read, which are not quantized with ranges found before."""
    sizes = {tensor.name: 4 * math.prod(tensor.dims) for tensor in graph.initializer}
    nodes = (node for body in bodies for node in body.node if node.op_type in settings.quantized_op_types)
    read = {name for node in nodes for name in node.input if name in sizes}
    if read:
        total = sum(sizes[name] for name in read) / 1e6
        ctx.warn(
            "weights-kept-float",
            f"{len(read):,} weight{'s stay' if len(read) > 1 else ' stays'} float ({total:.2g} MB): they are"
            f" used in bodies of If, Loop and Scan, where activations cannot be calibrated. {DEFAULT}"
            " quantizes them.",
        )


def _of_one_scale(model: Any) -> dict[str, list[dict[str, Any]]]:
    """Return overrides for the weights that get one scale, since ONNX Runtime multiplies no others.

    These are stacks of matrices, and first operands, whose outputs are their rows.
    """
    from onnxruntime.quantization import QuantType

    ranks = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    names = {node.input[0] for node in products if node.input[0] in ranks}
    names |= {name for node in products for name in node.input if ranks.get(name, 0) > _MATRIX}
    return {name: [{"quant_type": QuantType.QInt8}] for name in sorted(names)}


def _named(graph: Any, kept: Mapping[int, str], ctx: Context) -> list[str]:
    """Return the names of the nodes at the places `kept`, which get one of their own; warn of them."""
    if not kept:
        return []
    times = Counter(node.name for node in graph.node)
    for at in kept:
        if times[graph.node[at].name] > 1 or not graph.node[at].name:
            name = f"{graph.node[at].op_type}_{at}"
            while name in times:
                name += "_"
            graph.node[at].name = name
            times[name] += 1
    found = [graph.node[at].name for at in kept]
    told = ", ".join(f"{graph.node[at].name} ({why})" for at, why in list(kept.items())[:_NAMED])
    more = f" and {len(kept) - _NAMED:,} more" if len(kept) > _NAMED else ""
    ctx.warn(
        "nodes-kept-float",
        f"{len(kept):,} node{'s stay' if len(kept) > 1 else ' stays'} float: {told}{more}.",
    )
    return found


def _static(model: Any, ranges: Any, exclude: list[str], settings: QuantizeOnnxSettings) -> Any:
    """Return onnxruntime's QDQQuantizer, which `quantize_static` runs after its own calibration."""
    from onnxruntime.quantization import QDQQuantizer, QuantType

    symmetric = settings.target == "tensorrt"
    return QDQQuantizer(
        model, settings.per_channel, False, QuantType.QInt8,
        QuantType.QInt8 if symmetric else QuantType.QUInt8,
        ranges, [], exclude, settings.quantized_op_types,
        {
            "ActivationSymmetric": symmetric, "WeightSymmetric": True, "DefaultTensorType": 1,
            "TensorQuantOverrides": _of_one_scale(model),
            "OpTypesToExcludeOutputQuantization": list(_FLOAT_OUTPUT),
            "QuantizeBias": not symmetric,  # TensorRT takes no int32 biases
        },
    )  # fmt: skip
