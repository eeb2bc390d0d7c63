"""Int8 attention for OpenVINO: its two matrix products multiply int8, as in NNCF's ModelType.TRANSFORMER.

Queries, keys and values get QuantizeLinear and DequantizeLinear where their linear layer writes them, before
heads are split: OpenVINO then writes int8 from the layer's own kernel, and Split, Reshape and Transpose move
a quarter of the bytes. They are outputs of one packed layer, which gets one scale for each of the three, all
symmetric: with zero points OpenVINO 2026.4 multiplies floats. Softmax lies between 0 and 1, in uint8 steps of
1/255.

    q = clip(round(x / scale), -128, 127),  scale = largest |x| on calibration samples / 127

The finished graph is changed, which passed the parity check; its outputs are then compared with its own
before. Measured in docs/measurements/openvino.md.

Shapes: B = batch, S = tokens, N = outputs of the packed layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, RunError
from smelt.export.graph_files import read_graph, write_graph
from smelt.export.parity.check_parity import ExportedModel
from smelt.export.parity.operator_checks import open_with_outputs
from smelt.export.parity.parity_samples import parity_samples
from smelt.export.parity.references import TorchReference, check_output, logits_for
from smelt.stage import Context

Scales = Mapping[str, NDArray[np.float32]]
CALIBRATION_ROWS, CALIBRATION_LENGTH = 64, 128
TOLERANCE_KIND = "int8-attention"
_SOFTMAX_SCALE = np.float32(1 / 255)
# between the product of queries and keys, and Softmax
_SCORE_OPERATORS = ("Add", "Mul", "Div", "Where", "Cast")
# between a layer's output and a product: they move values, or multiply by a constant
_LAYOUT_OPERATORS = ("Transpose", "Reshape", "Mul", "Div")


class _Values:
    """Which node of a graph makes each value, and which values are constant."""

    def __init__(self, graph: Any) -> None:
        self.producers = {output: node for node in graph.node for output in node.output}
        self.constants = {value.name for value in graph.initializer}
        for node in graph.node:
            if node.input and all(not name or name in self.constants for name in node.input):
                self.constants.update(node.output)  # dequantized weights

    def products(self, graph: Any) -> Iterator[Any]:
        """Yield both products of each attention: of queries and keys, and of Softmax and values."""
        for node in graph.node:
            softmax = self.producers.get(node.input[0]) if node.op_type == "MatMul" else None
            if softmax is not None and softmax.op_type == "Softmax":
                scores = self._score_product(softmax.input[0])
                yield from [scores, node] if scores is not None else []

    def _score_product(self, name: str) -> Any:
        node = self.producers.get(name)
        if node is None or name in self.constants:
            return None
        if node.op_type == "MatMul":
            return None if self.constants & set(node.input) else node
        if node.op_type not in _SCORE_OPERATORS:
            return None
        return next(filter(None, map(self._score_product, node.input)), None)

    def layer_output(self, name: str) -> str:
        """Return the value that `name` is a rearranged part of, before a Split if there is one."""
        node = self.producers.get(name)
        if node is None:
            return name
        if node.op_type == "Split":
            return str(node.input[0])
        if node.op_type not in _LAYOUT_OPERATORS:
            return name
        variable = [value for value in node.input if value and value not in self.constants]
        is_layout = node.op_type in ("Transpose", "Reshape")  # a shape may be computed
        return self.layer_output(node.input[0] if is_layout else variable[0]) if (
            is_layout or len(variable) == 1
        ) else name  # fmt: skip


def attention_inputs(model: Any) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return the values to quantize: layer outputs with the parts that Split makes of them, and Softmaxes.

    Args:
        model: an onnx.ModelProto of standard operators.
    """
    values = _Values(model.graph)
    layers: dict[str, tuple[str, ...]] = {}
    softmaxes = []
    for product in values.products(model.graph):
        for name in product.input:
            if values.producers[name].op_type == "Softmax":
                softmaxes.append(name)
                continue
            output = values.layer_output(name)
            splits = [n for n in model.graph.node if n.op_type == "Split" and n.input[0] == output]
            layers[output] = tuple(splits[0].output) if splits else (output,)
    return layers, softmaxes


def attention_scales(path: Path, batch: Any, threads: int | None) -> dict[str, NDArray[np.float32]]:
    """Return the scales of layer outputs: float32 [N] where Split follows, else a scalar.

    Args:
        path: of the graph, which is run with ONNX Runtime one sample at a time.
        batch: samples, padded on the right.
        threads: of ONNX Runtime.
    """
    model = read_graph(path, values=False)
    layers, _ = attention_inputs(model)
    parts = [part for names in layers.values() for part in names]
    session = open_with_outputs(model, path.parent, path.stem, parts, threads)
    input_types = {value.name: value.type for value in session.get_inputs()}
    largest = dict.fromkeys(parts, 0.0)
    widths: dict[str, int] = {}
    for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
        row = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        feeds = {
            name: row[name][None, mask == 1].astype(np.int32 if "int32" in kind else np.int64)
            for name, kind in input_types.items()
        }
        for part, value in zip(parts, session.run(parts, feeds), strict=True):
            largest[part] = max(largest[part], float(np.abs(value).max()))
            widths[part] = value.shape[-1]
    if not np.isfinite(list(largest.values())).all():
        raise RunError(
            "onnx: attention: int8: queries, keys or values are not finite on calibration samples. Set"
            " attention: float.",
            code="non-finite-outputs",
        )
    scales = {part: np.float32((value or 127.0) / 127) for part, value in largest.items()}
    return {
        output: np.concatenate([np.full(widths[part], scales[part], np.float32) for part in names])
        if len(names) > 1
        else np.asarray(scales[names[0]])
        for output, names in layers.items()
    }


def quantize_attention(model: Any, scales: Scales) -> None:
    """Insert QuantizeLinear and DequantizeLinear before the products of attention, in place.

    Args:
        model: an onnx.ModelProto.
        scales: of layer outputs, see `attention_scales`.
    """
    from onnx import helper, numpy_helper

    graph = model.graph
    _, softmaxes = attention_inputs(model)
    grids: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {
        name: (scale, np.zeros(scale.shape, np.int8)) for name, scale in scales.items()
    }
    grids |= {name: (np.asarray(_SOFTMAX_SCALE), np.asarray(0, np.uint8)) for name in softmaxes}
    nodes = []
    for node in graph.node:
        node.input[:] = [f"{name}.dequantized" if name in grids else name for name in node.input]
        nodes.append(node)
        for name in (output for output in node.output if output in grids):
            scale, zero = grids[name]
            constants = [f"{name}.scale", f"{name}.zero_point"]
            graph.initializer.append(numpy_helper.from_array(scale, constants[0]))
            graph.initializer.append(numpy_helper.from_array(zero, constants[1]))
            axis: dict[str, Any] = {"axis": -1} if scale.ndim else {}
            for kind, source, target in (
                ("QuantizeLinear", name, f"{name}.quantized"),
                ("DequantizeLinear", f"{name}.quantized", f"{name}.dequantized"),
            ):
                nodes.append(helper.make_node(kind, [source, *constants], [target], **axis))
    del graph.node[:]
    graph.node.extend(nodes)


def export_int8_attention(
    subject: ExportedModel, reference: TorchReference, parent: Any, source: Path, ctx: Context
) -> None:
    """Quantize attention of the finished graph in `ctx.out`, in place; compare it with the graph before.

    Args:
        subject: the graph, which passed the parity check.
        reference: the samples of the parity check.
        parent: the runner of the model.
        source: the folder with the tokenizer.
        ctx: gets details: the number of samples and products, and the differences.

    Raises:
        InputError: there are no samples, or the graph has no attention of this form.
        RunError: a value is not finite.
        ParityError: the outputs differ too much.
    """
    name = subject.graphs[-1].name
    path = subject.folder / f"{name}.onnx"
    batch: Any
    batch, is_real = parity_samples(parent, source, ctx.data, ctx.task, CALIBRATION_ROWS, CALIBRATION_LENGTH)
    if not is_real:
        raise InputError(
            "onnx: attention: int8 needs calibration or train data for its scales. Add data: {calibration:"
            " FILE}, or set attention: float.",
            code="no-calibration-data",
        )
    scales = attention_scales(path, batch, ctx.threads)
    if not scales:
        raise InputError(
            f"onnx: attention: int8: {name}.onnx has no product of Softmax and values. Set attention: float.",
            code="does-not-fit-model",
            setting="attention",
        )
    before = _outputs(subject, reference)
    model = read_graph(path)
    _, softmaxes = attention_inputs(model)
    quantize_attention(model, scales)
    write_graph(model, path)
    ctx.details["attention"] = {
        "dtype": "int8",
        "samples": len(batch.input_ids),
        "products": 2 * len(softmaxes),
        "against_float": check_output(
            name, subject.output_name, before, _outputs(subject, reference), TOLERANCE_KIND
        ),
    }


def _outputs(subject: ExportedModel, reference: TorchReference) -> Any:
    from smelt.runtimes.registry import open_folder

    with open_folder(subject.folder, "onnx", subject.target, subject.threads) as runner:
        return logits_for(runner, reference)
