"""Run ONNX Runtime's quantizers with the nodes that must remain float and the calibrated ranges."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from smelt.core.stage import Context
from smelt.export.precision.value_types import iter_graphs
from smelt.export.third_party.calibrate_activations import ActivationCalibration, calibrate_activations
from smelt.export.third_party.float_nodes import (
    float_only_nodes,
    masked_values,
    unfused_activations,
    unquantizable_nodes,
)
from smelt.export.third_party.quantize_settings import QuantizeOnnxSettings
from smelt.runtime.schemes.registry import DEFAULT_SCHEME

# Their outputs are rounded once less than those of a convolution: int8 consumers round their own inputs, and
# all others (sums, norms, activations) compute in float anyway. MiniLM: less error and not slower.
_FLOAT_OUTPUT_OPS = ("MatMul", "Gemm")
_MAX_NAMED = 5  # nodes in a warning
_MATRIX = 2  # dimensions


def run_ort_quantizer(
    source: Path, target: Path, settings: QuantizeOnnxSettings, feeds: list[Any], ctx: Context
) -> None:
    """Write the quantized graph of `source` as `target`.

    Args:
        source: a graph as `prepare_for_quantizer` returns it.
        target: in a folder for temporary files.
        settings: of the stage.
        feeds: calibration samples, call by call.
        ctx: gets a warning of the nodes that remain float.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.quant_utils import load_model_with_shape_infer, update_opset_version

    from smelt.export.graph_files import MAX_INLINE_BYTES, external_data_path

    size = sum(file.stat().st_size for file in (source, external_data_path(source)) if file.is_file())
    model = update_opset_version(load_model_with_shape_infer(source), QuantType.QInt8)
    kinds = _value_types(model.graph)
    kept = float_only_nodes(model, kinds, settings.quantized_op_types)
    bodies = list(iter_graphs(model.graph))[1:]
    if settings.uses_calibration:
        kept = unfused_activations(model.graph, settings.quantized_op_types) | kept
        found = _calibrate(source, model, kinds, settings, feeds, target.parent)
        for at, node in enumerate(model.graph.node):
            if node.op_type in settings.quantized_op_types and found.huge & {*node.input, *node.output}:
                kept.setdefault(at, "unbounded values on the calibration samples")
        _warn_about_subgraphs(model.graph, bodies, settings, ctx)
        single = _per_tensor_overrides(model) if settings.per_channel else {}
        if single:
            ctx.warn(
                "per-tensor-weights",
                f"{len(single):,} weight{'s have' if len(single) > 1 else ' has'} one scale instead of one"
                " per channel, because ONNX Runtime does not support per-channel scales for batched"
                " matrices and constant first operands.",
            )
        names = [*settings.exclude, *_name_float_nodes(model.graph, kept, ctx)]
        quantizer = _qdq_quantizer(model, found.ranges, names, settings)
        quantizer.quantize_model()
        quantizer.model.save_model_to_file(target, size > MAX_INLINE_BYTES)
        return
    names = [*settings.exclude, *_name_float_nodes(model.graph, kept, ctx)]
    for body in bodies:
        unfit = unquantizable_nodes(body, kinds, settings.quantized_op_types)
        # the quantizer does not find weights of an LSTM in an outer graph
        unfit |= {at: "inside If, Loop or Scan" for at, one in enumerate(body.node) if one.op_type == "LSTM"}
        names += _name_float_nodes(body, unfit, ctx)
    quantize_dynamic(
        model if kept or bodies else source, target, op_types_to_quantize=settings.quantized_op_types,
        per_channel=settings.per_channel,
        # Without VNNI, int8 weights need x64quantprecision, which ONNX Runtime does not apply in inner graphs.
        weight_type=QuantType.QUInt8 if bodies else QuantType.QInt8,
        nodes_to_exclude=[*names, *(f"{name}_MatMul" for name in names)],  # of a Gemm
        use_external_data_format=size > MAX_INLINE_BYTES,
        extra_options={"DefaultTensorType": 1, "EnableSubgraph": bool(bodies)},
    )  # fmt: skip


def _value_types(graph: Any) -> dict[str, int]:
    """Return the type of each value whose type is known, as an onnx.TensorProto number."""
    values = (*graph.value_info, *graph.input, *graph.output)
    kinds = {value.name: value.type.tensor_type.elem_type for value in values}
    return kinds | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _calibrate(
    source: Path, model: Any, kinds: Mapping[str, int], settings: QuantizeOnnxSettings, feeds: list[Any],
    folder: Path,
) -> ActivationCalibration:  # fmt: skip
    from onnx import TensorProto

    wide = {name for name, kind in kinds.items() if kind != TensorProto.FLOAT}
    with TemporaryDirectory(dir=folder) as apart:
        but = masked_values(model.graph) | wide
        return calibrate_activations(
            source, settings.quantized_op_types, settings.calibration_method, feeds, but, Path(apart)
        )


def _warn_about_subgraphs(
    graph: Any, bodies: list[Any], settings: QuantizeOnnxSettings, ctx: Context
) -> None:
    """Warn about weights of inner graphs, which static quantization leaves in float."""
    sizes = {tensor.name: 4 * math.prod(tensor.dims) for tensor in graph.initializer}
    nodes = (node for body in bodies for node in body.node if node.op_type in settings.quantized_op_types)
    read = {name for node in nodes for name in node.input if name in sizes}
    if read:
        total = sum(sizes[name] for name in read) / 1e6
        ctx.warn(
            "weights-kept-float",
            f"{len(read):,} weight{'s remain' if len(read) > 1 else ' remains'} float ({total:.2g} MB): they"
            " are used inside If, Loop or Scan, where activations cannot be calibrated. Use scheme:"
            f" {DEFAULT_SCHEME} to quantize them.",
        )


def _per_tensor_overrides(model: Any) -> dict[str, list[dict[str, Any]]]:
    """Return overrides for the weights that get a single scale, as ONNX Runtime requires.

    These are stacks of matrices, and first operands, whose outputs are their rows.
    """
    from onnxruntime.quantization import QuantType

    ranks = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    names = {node.input[0] for node in products if node.input[0] in ranks}
    names |= {name for node in products for name in node.input if ranks.get(name, 0) > _MATRIX}
    return {name: [{"quant_type": QuantType.QInt8}] for name in sorted(names)}


def _name_float_nodes(graph: Any, kept: Mapping[int, str], ctx: Context) -> list[str]:
    """Return the names of the nodes at the indices `kept`, giving them unique names; warn about them."""
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
    told = ", ".join(f"{graph.node[at].name} ({why})" for at, why in list(kept.items())[:_MAX_NAMED])
    more = f" and {len(kept) - _MAX_NAMED:,} more" if len(kept) > _MAX_NAMED else ""
    ctx.warn(
        "nodes-kept-float",
        f"{len(kept):,} node{'s remain' if len(kept) > 1 else ' remains'} float: {told}{more}.",
    )
    return found


def _qdq_quantizer(model: Any, ranges: Any, exclude: list[str], settings: QuantizeOnnxSettings) -> Any:
    """Return onnxruntime's QDQQuantizer, which `quantize_static` runs after its own calibration."""
    from onnxruntime.quantization import QDQQuantizer, QuantType

    symmetric = settings.target == "tensorrt"
    return QDQQuantizer(
        model, settings.per_channel, False, QuantType.QInt8,
        QuantType.QInt8 if symmetric else QuantType.QUInt8,
        ranges, [], exclude, settings.quantized_op_types,
        {
            "ActivationSymmetric": symmetric, "WeightSymmetric": True, "DefaultTensorType": 1,
            "TensorQuantOverrides": _per_tensor_overrides(model),
            "OpTypesToExcludeOutputQuantization": list(_FLOAT_OUTPUT_OPS),
            "QuantizeBias": not symmetric,  # TensorRT does not support int32 biases
        },
    )  # fmt: skip
