"""A folder of graphs that compute exactly what the deployed ones approximate, on the same constants.

A quantized operator becomes the float32 product with what its own codes, scales and zero points stand for;
a graph in fp16 computes in float32. All else, masks, biases, wiring, stays as it is in the file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from smelt.export.graph_files import data_names, read_graph, write_graph
from smelt.export.precision.narrow import float_values, onnx_type
from smelt.runtime.backends.openvino_module import ACTIVATION_BLOCKS
from smelt.runtime.schemes.registry import exact_nodes
from smelt.runtime.text.sentence_files import MODULES

_HALVES = (onnx_type("fp16"), onnx_type("bf16"))


@contextmanager
def exact_twin(folder: Path, names: Iterable[str], half: bool, rounding: bool = False) -> Iterator[Path]:
    """Give a folder like `folder`, whose graphs `names` compute in float32; it is gone after the block.

    Args:
        folder: with graphs, config and whatever else a runner reads.
        names: of the graphs, without `.onnx`.
        half: whether they are fp16 or bf16.
        rounding: with `half`, round what each node gives as the graph itself would: so a CPU shows what
            overflows. ONNX Runtime has few kernels of these types there; of float16 it leaves out the casts
            between two nodes, and of bfloat16 it runs nothing.
    """
    with TemporaryDirectory(dir=folder, prefix=".exact-") as made:
        twin = Path(made)
        for name in ("config.json", "generation_config.json", MODULES):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, twin / name)
        for name in names:
            path = folder / f"{name}.onnx"
            model = read_graph(path, values=half)
            if half:
                widen_halves(model, rounding)
            for data in data_names(model):
                if not (twin / data).exists():
                    _link(folder / data, twin / data)
            dequantize(model)
            write_graph(model, twin / path.name)
        yield twin


def _link(source: Path, target: Path) -> None:
    """Let `target` be the file `source`; copy it where the file system knows no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def dequantize(model: Any) -> int:
    """Replace the quantized operators of an onnx.ModelProto in place; return how many there were.

    Activations go past QuantizeLinear and the DequantizeLinear behind it. The DequantizeLinear of a matrix
    that is multiplied with becomes Cast and Mul: ONNX Runtime would make of it what rounds activations.
    """
    nodes: list[Any] = []
    codes: set[str] = set()  # of activations
    multiplied = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    found = 0
    for node in model.graph.node:
        exact = exact_nodes(node)
        back = node.op_type == "DequantizeLinear" and node.input[0] in codes
        if back or node.op_type == "QuantizeLinear":
            exact = [_past(node)]
            codes.add(node.output[0])
        elif node.op_type == "DequantizeLinear" and node.output[0] in multiplied and not _blocked(node):
            exact = _as_floats(node)
        found += exact is not None and node.op_type not in ("QuantizeLinear", "DequantizeLinear")
        found += back
        nodes += [node] if exact is None else exact
    if found:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    for said in [said for said in model.metadata_props if said.key == ACTIVATION_BLOCKS]:
        model.metadata_props.remove(said)  # so that OpenVINO lets activations whole
    kept = [value for value in model.graph.value_info if value.name not in codes]  # others are floats now
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    return found


def _blocked(node: Any) -> bool:
    """Say whether a matrix has a scale for each block of inputs; nobody rounds what it is multiplied with."""
    return any(attribute.name == "block_size" and attribute.i for attribute in node.attribute)


def _as_floats(node: Any) -> list[Any]:
    """Return the DequantizeLinear of a matrix with a scale per column, zero points all 0, as Cast and Mul."""
    from onnx import TensorProto, helper

    codes, scales = node.input[:2]
    whole = f"{node.name}.float"
    return [
        helper.make_node("Cast", [codes], [whole], to=TensorProto.FLOAT),
        helper.make_node("Mul", [whole, scales], node.output, node.name),
    ]


def _past(node: Any) -> Any:
    from onnx import helper

    return helper.make_node("Identity", node.input[:1], node.output, node.name)


def widen_halves(model: Any, rounding: bool = False) -> None:
    """Turn a graph that `narrow` made back to float32, in place; its constants keep their values.

    With `rounding`, what nodes gave in half precision is rounded to it and back.
    """
    from onnx import TensorProto

    graph = model.graph
    before = {kind: float_values(model, kind) for kind in _HALVES} if rounding else {}
    for tensor in graph.initializer:
        _widen(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _widen(attribute.t)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in _HALVES:
                attribute.i = TensorProto.FLOAT
    for value in [*graph.input, *graph.output]:
        if value.type.tensor_type.elem_type in _HALVES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    del graph.value_info[:]
    for kind, names in before.items():
        _round(graph, names, kind)


def _round(graph: Any, names: set[str], kind: int) -> None:
    from onnx import TensorProto, helper

    nodes: list[Any] = []
    for node in graph.node:
        nodes.append(node)
        for place, name in enumerate(node.output):
            if name in names:
                node.output[place] = whole = f"{name}.whole"
                nodes.append(helper.make_node("Cast", [whole], [f"{name}.rounded"], to=kind))
                nodes.append(helper.make_node("Cast", [f"{name}.rounded"], [name], to=TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)


def _widen(tensor: Any) -> None:
    from onnx import TensorProto, numpy_helper

    if tensor.data_type in _HALVES:
        values = numpy_helper.to_array(tensor).astype("<f4")
        tensor.ClearField("int32_data")
        tensor.data_type, tensor.raw_data = TensorProto.FLOAT, np.ascontiguousarray(values).tobytes()
