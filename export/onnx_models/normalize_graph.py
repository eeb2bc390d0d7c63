"""Normalize a third-party graph for the stages, rename reserved names, and copy the other files of a model.

- Functions of the model are inlined: quantizers and conversions see operators, not calls.
- Weights are not inputs. Before IR version 4 each had to be listed as one; later a listed weight is the
  default value of an input.
- Weights of inner graphs (If, Loop, Scan) are moved to the outermost graph, where quantizers find them.
- Value names are unique. Two branches of an If may use the same name; here they do not.
- A model of float16, bfloat16 or float64 weights computes in float32; its inputs and outputs keep their
  types. Float32 has every value of float16 and bfloat16.

`rename_reserved` renames values and nodes whose names ONNX Runtime's quantizers could create themselves. For
a value `x` they create `x_scale`, `x_quantized`, `x_DequantizeLinear` and so on. They do not check whether
the graph already has such a name, as one with the inputs `image` and `image_scale` does. The result is then
an invalid graph, or one that reads another value. New nodes are named after the original node, so in a graph
with inner graphs each node needs a unique name.
"""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, did_you_mean
from smelt.export.graph_files import read_graph
from smelt.export.onnx_models.fold_moved_weights import fold_moved_weights
from smelt.runtimes.graph_walk import all_nodes, iter_graphs, iter_model_tensors, subgraphs
from smelt.runtimes.onnx_import.graph_files import NON_FLOAT32_DTYPES, dominant_float_type
from smelt.stage import Context

_LISTED = 4  # since this IR version an initializer need not be an input
_MATRIX = 2  # dimensions


def normalize_graph(path: Path) -> Any:
    """Return the graph in `path` as an onnx.ModelProto with its weights, normalized for the stages."""
    model = inline_functions(path)
    remove_weight_inputs(model)
    dtype = dominant_float_type(model)
    if dtype in NON_FLOAT32_DTYPES:  # before weights are moved, of which only float32 are
        _convert_to_float32(model, (*_HALF_FLOATS, _FLOAT64) if dtype == "float64" else _HALF_FLOATS)
    graph = model.graph
    used_names = _defined_names(graph)
    for node in graph.node:
        for body in subgraphs(node):
            _rename_shadowing(body, {}, used_names)
    fold_moved_weights(model)
    for node in graph.node:
        for body in subgraphs(node):
            _hoist_matrices(body, graph)
    return model


def is_normalized(model: Any) -> bool:
    """Return whether `normalize_graph` would not change a model, which may be read without values."""
    graph = model.graph
    listed_initializers = {value.name for value in graph.input} & {
        tensor.name for tensor in graph.initializer if len(tensor.dims) >= _MATRIX
    }
    inner = any(subgraphs(node) for node in graph.node)
    narrow = dominant_float_type(model) in NON_FLOAT32_DTYPES
    return not (model.functions or listed_initializers or inner or narrow or model.ir_version < _LISTED)


def iter_model_nodes(model: Any) -> Iterator[Any]:
    """Yield the nodes of a model, of its inner graphs and of its functions."""
    yield from all_nodes(model.graph.node)
    for function in model.functions:
        yield from all_nodes(function.node)


def match_nodes(patterns: Iterable[str], names: Collection[str], setting: str) -> list[str]:
    """Return the node names that are in `patterns`, or match one of them (`/encoder/*`).

    Raises:
        InputError: a pattern matches no name (`unknown-node`).
    """
    matches: dict[str, None] = {}
    for pattern in patterns:
        escaped = pattern.replace("[", "[[]")  # brackets are part of names
        found_names = (
            [pattern] if pattern in names else [name for name in names if fnmatch.fnmatchcase(name, escaped)]
        )
        if not found_names:
            raise InputError(
                f"the graph has no node '{pattern[:80]}', which `{setting}` names."
                f"{did_you_mean(pattern, names)}",
                code="unknown-node",
                setting=setting,
            )
        matches |= dict.fromkeys(found_names)
    return list(matches)


def inline_functions(path: Path) -> Any:
    """Return the graph in `path` with its weights and without functions, as far as onnx can inline them."""
    from onnx import inliner
    from onnx.external_data_helper import load_external_data_for_model

    structure = read_graph(path, values=False)
    if not structure.functions:
        return read_graph(path)
    try:
        model = inliner.inline_local_functions(structure, convert_version=True)
    except Exception:  # from C++: if no converter handles a function's opset
        model = inliner.inline_local_functions(structure)
    load_external_data_for_model(model, str(path.parent))
    return model


def remove_weight_inputs(model: Any) -> None:
    """Remove the weights from the list of inputs."""
    graph = model.graph
    old = model.ir_version < _LISTED
    weights = {t.name for t in graph.initializer if old or len(t.dims) >= _MATRIX}
    for value in [value for value in graph.input if value.name in weights]:
        graph.input.remove(value)
    model.ir_version = max(_LISTED, model.ir_version)


# float16, bfloat16 and float64 in onnx.TensorProto, and the attributes of nodes that hold such a number
_HALF_FLOATS, _FLOAT64 = (10, 16), 11
_DTYPE_ATTRIBUTES = ("to", "dtype", "output_datatype", "output_dtype", "stash_type")


def _convert_to_float32(model: Any, dtypes: Collection[int]) -> None:
    """Convert the weights and values of the types `dtypes` to float32, but not inputs and outputs."""
    from onnx import TensorProto, helper

    graph = model.graph
    inputs = {value.name for value in graph.input}
    dtype_by_end = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    dtype_by_end = {name: dtype for name, dtype in dtype_by_end.items() if dtype in dtypes}
    for tensor in iter_model_tensors(model):
        if tensor.data_type in dtypes and tensor.name not in inputs:
            _narrow_tensor(tensor)
    for node in all_nodes(graph.node):
        for attribute in node.attribute:
            if attribute.name in _DTYPE_ATTRIBUTES and attribute.i in dtypes:
                attribute.i = TensorProto.FLOAT
    for inner in iter_graphs(graph):
        _set_float32((*inner.input, *inner.output, *inner.value_info), dtypes)
    used_names = value_names(graph)
    converted = {name: unused_name(name, used_names) for name in dtype_by_end}
    defaults = [tensor for tensor in graph.initializer if tensor.name in inputs]
    ends = [(end, end.name) for end in (*graph.input, *graph.output, *defaults)]
    _rename_values(graph, converted)
    for end, name in ends:
        end.name = name
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.elem_type = dtype_by_end.get(value.name, value.type.tensor_type.elem_type)
    for name, dtype in dtype_by_end.items():
        if name in inputs:
            graph.node.insert(0, helper.make_node("Cast", [name], [converted[name]], to=TensorProto.FLOAT))
        else:
            graph.node.append(helper.make_node("Cast", [converted[name]], [name], to=dtype))


def _narrow_tensor(tensor: Any) -> None:
    """Convert a tensor to float32; what is beyond its range becomes its largest or smallest number."""
    from onnx import numpy_helper

    values, limits = numpy_helper.to_array(tensor).astype(np.float64), np.finfo(np.float32)
    finite = np.where(np.isfinite(values), np.clip(values, limits.min, limits.max), values)
    tiny = (finite != 0) & (np.abs(finite) < limits.tiny)
    narrow = np.where(tiny, np.sign(finite) * limits.tiny, finite).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(narrow, tensor.name))


def _set_float32(values: Iterable[Any], dtypes: Collection[int]) -> None:
    """Replace the types `dtypes` of onnx.ValueInfoProto, also inside sequences and optionals."""
    pending = [value.type for value in values]
    while pending:
        kind = pending.pop()
        field = kind.WhichOneof("value")
        if field in ("sequence_type", "optional_type"):
            pending.append(getattr(kind, field).elem_type)
        elif field in ("tensor_type", "sparse_tensor_type"):
            tensor_type = getattr(kind, field)
            if tensor_type.elem_type in dtypes:
                tensor_type.elem_type = 1


def _defined_names(graph: Any) -> set[str]:
    """Return the names of the values that a graph defines."""
    names = {value.name for value in (*graph.input, *graph.initializer)}
    names |= {sparse.values.name for sparse in graph.sparse_initializer}
    return names.union(*(node.output for node in graph.node)) - {""}


def _rename_shadowing(graph: Any, around: Mapping[str, str], taken: set[str]) -> None:
    """Rename the values of an inner graph to names that are not `taken`, and add these to `taken`.

    around: new names of values of the enclosing graphs.
    """
    names = {name: new for name, new in around.items() if name not in _defined_names(graph)}
    for name in sorted(_defined_names(graph)):
        new, suffix = name, 0
        while new in taken:
            suffix += 1
            new = f"{name}.{suffix}"
        taken.add(new)
        names[name] = new
    tensors = [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
    for value in (*graph.input, *graph.output, *graph.value_info, *tensors):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for body in subgraphs(node):
            _rename_shadowing(body, names, taken)


def _hoist_matrices(body: Any, outermost: Any) -> None:
    """Move the float matrices of an inner graph, and of graphs inside it, to the outermost graph."""
    from onnx import TensorProto

    ends = {value.name for value in (*body.input, *body.output)}
    for tensor in list(body.initializer):
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) >= _MATRIX and tensor.name not in ends:
            outermost.initializer.append(tensor)
            body.initializer.remove(tensor)
    for node in list(body.node):
        is_constant = node.op_type == "Constant" and node.output[0] not in ends
        constant_tensors = (
            [a.t for a in node.attribute if a.name == "value" and a.HasField("t")] if is_constant else []
        )
        for tensor in constant_tensors:
            if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) >= _MATRIX:
                tensor.name = node.output[0]
                outermost.initializer.append(tensor)
                body.node.remove(node)
        for subgraph in subgraphs(node):
            _hoist_matrices(subgraph, outermost)


def rename_reserved(path: Path, folder: Path, keep: Iterable[str] = ()) -> tuple[Path, dict[str, str]]:
    """Return the graph in `path`, or a copy in `folder` without such names, and the map for `restore_names`.

    Args:
        path: an ONNX file; names in its inner graphs are unique.
        folder: an empty one for the copy.
        keep: names of nodes that are not changed.
    """
    from smelt.export.graph_files import write_graph

    structure = read_graph(path, values=False).graph
    values, nodes = value_names(structure), _node_names(structure)
    used_names = values | nodes
    clashing = sorted(
        {prefix for name in used_names for prefix in _conflicting_prefixes(name) if prefix in values}
    )
    nodes_too = sorted(
        {name for name in nodes if any(prefix in used_names for prefix in _conflicting_prefixes(name))}
        - {*keep}
    )
    nested = any(subgraphs(node) for node in structure.node)
    if not clashing and not nodes_too and not nested:
        return path, {}
    new = {name: unused_name(name, used_names) for name in clashing}
    model = read_graph(path)
    _rename_values(model.graph, new)
    _rename_nodes(model.graph, {name: unused_name(name, used_names) for name in nodes_too})
    if nested:
        make_node_names_unique(model.graph, {*keep}, used_names)
    write_graph(model, folder / path.name)
    return folder / path.name, {replacement: original for original, replacement in new.items()}


def restore_names(model: Any, names: Mapping[str, str]) -> None:
    """Give the values of the quantized `model` the names that `rename_reserved` changed."""
    if names:
        _rename_values(model.graph, names)


def _conflicting_prefixes(name: str) -> list[str]:
    """Return the names for which the quantizers could create `name`; they append no numbers."""
    underscores = (position for position, character in enumerate(name) if character == "_")
    return [name[:position] for position in underscores if position and not name[position + 1 :].isdigit()]


def unused_name(name: str, taken: set[str]) -> str:
    """Return an unused name that is not a prefix of another one, and add it to `taken`."""
    suffix = 0
    while any(other.startswith(f"{name}.{suffix}") for other in taken):
        suffix += 1
    taken.add(f"{name}.{suffix}")
    return f"{name}.{suffix}"


def value_names(graph: Any) -> set[str]:
    """Return the names of all values of a graph and of its inner graphs."""
    names = {value.name for value in (*graph.input, *graph.initializer)}
    names |= {sparse.values.name for sparse in graph.sparse_initializer}
    for node in graph.node:
        names.update(name for name in node.output if name)
        for subgraph in subgraphs(node):
            names |= value_names(subgraph)
    return names


def _node_names(graph: Any) -> set[str]:
    names = {node.name for node in graph.node if node.name}
    return names.union(*(_node_names(subgraph) for node in graph.node for subgraph in subgraphs(node)))


def _rename_values(graph: Any, names: Mapping[str, str]) -> None:
    tensors = [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
    for value in (*graph.input, *graph.output, *graph.value_info, *tensors):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for subgraph in subgraphs(node):
            _rename_values(subgraph, names)


def _rename_nodes(graph: Any, names: Mapping[str, str]) -> None:
    for node in graph.node:
        node.name = names.get(node.name, node.name)
        for subgraph in subgraphs(node):
            _rename_nodes(subgraph, names)


def make_node_names_unique(graph: Any, keep: set[str], taken: set[str]) -> None:
    """Give unused names to nodes without a name, and to all but the first node with the same name."""
    used_names, begin = set(keep), unused_name("node", taken)
    for node_index, node in enumerate(all_nodes(graph.node)):
        if node.name not in keep:
            if not node.name or node.name in used_names:
                node.name = f"{begin}.{node.op_type}.{node_index}"
            used_names.add(node.name)


_GRAPH_SUFFIXES = (".onnx", ".onnx_data")
_COPIED_DETAILS = (
    "foreign",
    "target",
    "dtype",
    "opset",
    "producer",
    "parameters",
    "scheme",
    "codes",
    "tokenizer",
    "license",
)


def ordered_graphs(src: Artifact) -> list[Path]:
    """Return the graphs of `src` in the order in which they are called."""
    return sorted(
        (src.path / name for name in src.manifest.files if name.endswith(_GRAPH_SUFFIXES[0])),
        key=lambda path: not path.stem.startswith("encoder"),
    )


def copy_model_files(src: Artifact, ctx: Context) -> None:
    """Copy config, tokenizer and signature of `src` into `ctx.out`, and its details."""
    for name in src.manifest.files:
        if not name.endswith(_GRAPH_SUFFIXES):
            (ctx.out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(src.path / name, ctx.out / name)
    ctx.details.update(
        {key: src.manifest.details[key] for key in _COPIED_DETAILS if key in src.manifest.details}
    )


def copy_graphs(src: Artifact, ctx: Context) -> None:
    """Copy the graph of `src` and its weights without changes."""
    for name in src.manifest.files:
        if name.endswith(_GRAPH_SUFFIXES):
            shutil.copyfile(src.path / name, ctx.out / name)
