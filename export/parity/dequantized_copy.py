"""Create a copy of graphs that computes exactly what the deployed ones approximate, and check constants.

In the copy a quantized operator becomes a float32 matrix multiplication with its dequantized weights; a graph
in fp16 computes in float32. Everything else (constants, masks, biases, connections) is unchanged.

`check_constants` compares the constants of a graph bit for bit with the tensors of their layers: exporters
name constants after the tensors of the module. A changed scale, a bias of zeros or a table of positions with
a wrong offset is found here without any arithmetic, however little it would change an output.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from onnx import TensorProto
from torch import Tensor, nn

from smelt.core.errors import ParityError
from smelt.export.graph_files import link_external_data, read_graph, write_graph
from smelt.export.value_types import values_of_type
from smelt.models.text_rules import MODULES_FILE
from smelt.quantization.schemes.registry import replace_with_float_nodes
from smelt.runtimes.openvino_backend import ACTIVATION_BLOCKS

_HALF_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


@contextmanager
def make_dequantized_copy(
    folder: Path, names: Iterable[str], widen: bool, rounding: bool = False
) -> Iterator[Path]:
    """Yield a copy of `folder` whose graphs `names` compute in float32; it is removed after the block.

    Args:
        folder: with graphs, config and other files of a runner.
        names: of the graphs, without `.onnx`.
        widen: whether they are fp16 or bf16.
        rounding: with `widen`, round the outputs of each node as the graph itself would, so that a CPU shows
            overflows. ONNX Runtime has few kernels of these types there; for float16 it omits the casts
            between two nodes, and bfloat16 does not run at all.
    """
    with TemporaryDirectory(dir=folder, prefix=".exact-") as temporary:
        copy = Path(temporary)
        for name in ("config.json", "generation_config.json", MODULES_FILE):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, copy / name)
        for name in names:
            path = folder / f"{name}.onnx"
            model = read_graph(path, values=widen)
            if widen:
                widen_to_float32(model, rounding)
            link_external_data(model, folder, copy)
            dequantize_graph(model)
            write_graph(model, copy / path.name)
        yield copy


def dequantize_graph(model: Any) -> int:
    """Replace the quantized operators of an onnx.ModelProto in place; return their number.

    QuantizeLinear and DequantizeLinear of activations are bypassed. The DequantizeLinear of a matrix becomes
    Cast and Mul, otherwise ONNX Runtime would fuse it into an operator that rounds activations.
    """
    nodes: list[Any] = []
    codes: set[str] = set()  # of activations
    multiplied = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    found = 0
    for node in model.graph.node:
        exact = replace_with_float_nodes(node)
        back = node.op_type == "DequantizeLinear" and node.input[0] in codes
        if back or node.op_type == "QuantizeLinear":
            exact = [_cache_node(node)]
            codes.add(node.output[0])
        elif node.op_type == "DequantizeLinear" and node.output[0] in multiplied and not _is_blockwise(node):
            exact = _dequantize_nodes(node)
        found += exact is not None and node.op_type not in ("QuantizeLinear", "DequantizeLinear")
        found += back
        nodes += [node] if exact is None else exact
    if found:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    for entry in [entry for entry in model.metadata_props if entry.key == ACTIVATION_BLOCKS]:
        model.metadata_props.remove(entry)  # so that OpenVINO does not round activations
    kept = [value for value in model.graph.value_info if value.name not in codes]  # others are floats now
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    return found


def _is_blockwise(node: Any) -> bool:
    """Return whether a matrix has a scale per block of inputs; its activations are not rounded."""
    return any(attribute.name == "block_size" and attribute.i for attribute in node.attribute)


def _dequantize_nodes(node: Any) -> list[Any]:
    """Return the DequantizeLinear of a matrix with a scale per column, zero points all 0, as Cast and Mul."""
    from onnx import helper

    codes, scales = node.input[:2]
    whole = f"{node.name}.float"
    return [
        helper.make_node("Cast", [codes], [whole], to=TensorProto.FLOAT),
        helper.make_node("Mul", [whole, scales], node.output, node.name),
    ]


def _cache_node(node: Any) -> Any:
    from onnx import helper

    return helper.make_node("Identity", node.input[:1], node.output, node.name)


def widen_to_float32(model: Any, rounding: bool = False) -> None:
    """Convert a graph of `convert_to_half` back to float32, in place; its constants keep their values.

    With `rounding`, half-precision outputs of nodes are rounded to that precision and back.
    """
    graph = model.graph
    before = {kind: values_of_type(model, kind) for kind in _HALF_TYPES} if rounding else {}
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _widen_tensor(attribute.t)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in _HALF_TYPES:
                attribute.i = TensorProto.FLOAT
    for value in [*graph.input, *graph.output]:
        if value.type.tensor_type.elem_type in _HALF_TYPES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    del graph.value_info[:]
    for kind, names in before.items():
        _insert_rounding(graph, names, kind)


def _insert_rounding(graph: Any, names: set[str], kind: int) -> None:
    from onnx import helper

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


def _widen_tensor(tensor: Any) -> None:
    from onnx import numpy_helper

    if tensor.data_type in _HALF_TYPES:
        values = numpy_helper.to_array(tensor).astype("<f4")
        tensor.ClearField("int32_data")
        tensor.data_type, tensor.raw_data = TensorProto.FLOAT, np.ascontiguousarray(values).tobytes()


def check_constants(graph: str, model: Any, module: nn.Module, folder: Path) -> int:
    """Compare the constants of a graph with the tensors of the exported module.

    Args:
        graph: name of the graph, for the message.
        model: its onnx.ModelProto; external weights need not be loaded.
        module: the exported module.
        folder: the folder of the graph.

    Returns:
        The number of compared constants.

    Raises:
        ParityError: one has other values than its tensor, or fewer: only rows of maximum length would show
            that a table lacks its last entries.
    """
    from onnx import numpy_helper

    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    compared = 0
    for constant in model.graph.initializer:
        tensor = tensors.get(constant.name)
        if tensor is None:
            continue
        values = numpy_helper.to_array(constant, base_dir=str(folder))
        expected = tensor.detach().cpu().numpy()
        if expected.dtype == np.float32 and values.dtype.itemsize == 2:  # fp16, bf16
            expected = expected.astype(values.dtype)
        if expected.size != values.size:
            _raise_size_mismatch(graph, constant.name, list(expected.shape), list(values.shape))
        if expected.shape != values.shape or expected.dtype != values.dtype:
            continue  # an optimizer changed its layout
        compared += 1
        if not np.array_equal(expected, values):
            _raise_value_mismatch(graph, model, constant.name, int((expected != values).sum()), values.size)
    return compared


def _raise_size_mismatch(graph: str, name: str, expected: list[int], found: list[int]) -> None:
    raise ParityError(
        f"{graph}: the constant '{name}' has the shape {found}, but its tensor in the model has"
        f" {expected}: the numbers of values differ.",
        code="shape-mismatch",
        file=f"{graph}.onnx",
    )


def _raise_value_mismatch(graph: str, model: Any, name: str, differ: int, size: int) -> None:
    layer, _, word = name.rpartition(".")
    readers = [f"'{node.name}' ({node.op_type})" for node in model.graph.node if name in node.input]
    raise ParityError(
        f"{graph}: the constant '{name}' of node {', '.join(readers[:3]) or '(none)'} differs from"
        f" {word or name} of its layer{f' {layer}' if layer else ''} in {differ:,} of {size:,} values.",
        code="constant-mismatch",
        file=f"{graph}.onnx",
    )
