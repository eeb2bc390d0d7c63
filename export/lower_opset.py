"""Write exported graphs in older opsets of ONNX, for runtimes such as TensorRT 8.

torch exports opset 18 and newer. Most operators of opset 18 have the same form in opset 13; those whose form
changed are rewritten here, and a node that needs a later opset is an error. Layer norms are exported as
elementwise operators below opset 17, which added LayerNormalization.

onnx's version converter (onnx 1.23) is no alternative: it has no rules down from opset 18 for Split, from 15
for Shape and Pow, and from 14 for additions of int64.

Source: https://github.com/onnx/onnx/blob/main/docs/Changelog.md
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from onnx import defs, helper, numpy_helper
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from smelt.core.errors import InputError
from smelt.export.value_types import node_types, value_types
from smelt.runtimes.graph_walk import normalized_domain

OLDEST_TORCH_OPSET = 18
LAYER_NORM_OPSET = 17
_MAX_NAMED, _INT64_MAX = 3, 2**63 - 1
# attributes whose default is the only form of older opsets; torch writes allowzero for sizes that are not 0
_DROPPED: dict[str, dict[str, Any]] = {
    "Reshape": {"allowzero": None},
    "BatchNormalization": {"training_mode": 0},
    "ScatterElements": {"reduction": b"none"},
    "ScatterND": {"reduction": b"none"},
}


def lower_opset(model: Any, opset: int, name: str) -> None:
    """Write an onnx.ModelProto of opset 18 in `opset`, 13 to 17, in place.

    Args:
        model: without graphs inside nodes.
        opset: of ONNX's standard operators.
        name: of the graph, for the message.

    Raises:
        InputError: `opset-too-low`, a node needs a later opset.
    """
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    types = value_types(model)
    nodes, later = [], []
    for node in graph.node:
        if normalized_domain(node.domain):
            nodes.append(node)
            continue
        if not defs.has(node.op_type, opset):
            later.append(node)
            continue
        schema = defs.get_schema(node.op_type, opset)
        nodes += _older_form(node, schema, graph, constants)
        if not _is_valid(node, schema, opset, types):
            later.append(node)
    if later:
        named = ", ".join(f"'{node.name}' ({node.op_type})" for node in later[:_MAX_NAMED])
        more = f" and {len(later) - _MAX_NAMED} more" if len(later) > _MAX_NAMED else ""
        raise InputError(
            f"onnx: {name} cannot be written in opset {opset}, because {named}{more} needs a later opset. Set"
            " a larger opset.",
            code="opset-too-low",
            setting="opset",
        )
    del graph.node[:]
    graph.node.extend(nodes)
    for item in model.opset_import:
        if not normalized_domain(item.domain):
            item.version = opset
    # runtimes of that time refuse newer versions of the file format
    model.ir_version = helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)


def _older_form(node: Any, schema: Any, graph: Any, constants: dict[str, Any]) -> list[Any]:
    """Return the nodes that compute `node` in the form of `schema`; `node` is changed in place."""
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    missing = values.keys() - schema.attributes.keys()
    if node.op_type == "Shape" and missing:
        return _sliced_shape(node, values, graph)
    dropped = _DROPPED.get(node.op_type, {})
    removed = {n for n in missing if n in dropped and dropped[n] in (None, values[n])}
    if "num_outputs" in missing and _set_split_sizes(node, values, graph):
        removed.add("num_outputs")
    if node.op_type.startswith("Reduce") and "noop_with_empty_axes" not in schema.attributes:
        removed |= _move_axes_to_attribute(node, values, constants)
    attributes = [attribute for attribute in node.attribute if attribute.name not in removed]
    del node.attribute[:]
    node.attribute.extend(attributes)
    return [node]


def _is_valid(node: Any, schema: Any, opset: int, types: dict[str, int]) -> bool:
    """Return whether `opset` has the attributes, inputs and types of a node; types by a value's name."""
    slots = node_types(node, {"": opset})
    if {a.name for a in node.attribute} - schema.attributes.keys() or slots is None:
        return False
    pairs = [*zip(node.input, slots.inputs, strict=True), *zip(node.output, slots.outputs, strict=True)]
    return all(slot.accepts(types[name]) for name, slot in pairs if name in types)


def _move_axes_to_attribute(node: Any, values: dict[str, Any], constants: dict[str, Any]) -> set[str]:
    """Write the constant axes of a reduction as its attribute; return the attributes to remove.

    Without axes all are reduced, or none with `noop_with_empty_axes`, which the older form lacks.
    """
    name = node.input[1] if len(node.input) > 1 else ""
    axes = numpy_helper.to_array(constants[name]).tolist() if name in constants else []
    if (name and name not in constants) or (not axes and values.get("noop_with_empty_axes")):
        return set()
    del node.input[1:]
    if axes:
        node.attribute.append(helper.make_attribute("axes", axes))
    return {"noop_with_empty_axes"}


def _set_split_sizes(node: Any, values: dict[str, Any], graph: Any) -> bool:
    """Add the sizes of a Split into `num_outputs` parts; return whether the size of its axis is known."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.input, *graph.value_info)}
    dimensions = shapes.get(node.input[0], ())
    size = dimensions[values.get("axis", 0)].dim_value if dimensions else 0
    if not size:
        return False
    count = values["num_outputs"]
    part = -(-size // count)  # the last part is smaller
    sizes = np.array([part] * (count - 1) + [size - part * (count - 1)], dtype=np.int64)
    name = f"{node.output[0]}.sizes"
    graph.initializer.append(numpy_helper.from_array(sizes, name))
    node.input.append(name)
    return True


def _sliced_shape(node: Any, bounds: dict[str, int], graph: Any) -> list[Any]:
    """Return the Shape of some dimensions as Shape and Slice; opset 15 added its bounds."""
    result = node.output[0]
    del node.attribute[:]
    node.output[0] = f"{result}.all"
    names = [f"{result}.{name}" for name in ("start", "end")]
    values = (bounds.get("start", 0), bounds.get("end", _INT64_MAX))
    graph.initializer.extend(
        numpy_helper.from_array(np.array([value], dtype=np.int64), name)
        for name, value in zip(names, values, strict=True)
    )
    return [node, helper.make_node("Slice", [node.output[0], *names], [result], f"{result}.slice")]


def elementwise_layer_norms(opset: int) -> AbstractContextManager[Any]:
    """Return a context in which layer norms are computed elementwise below opset 17."""
    return _ElementwiseLayerNorms() if opset < LAYER_NORM_OPSET else nullcontext()


class _ElementwiseLayerNorms(TorchFunctionMode):
    """Replaces calls of the functions, which code may have imported by name: no attribute is patched."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the result of `func`."""
        is_norm = func in (torch.layer_norm, functional.layer_norm)
        return (_layer_norm if is_norm else func)(*args, **(kwargs or {}))


def _layer_norm(
    input: Tensor,  # the names of torch's arguments, which callers may use
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Compute a layer norm (Ba et al. 2016, arXiv:1607.06450) over the last dimensions."""
    axes = list(range(-len(normalized_shape), 0))
    centered = input - input.mean(axes, keepdim=True)
    # a vector, because onnxscript's optimizer removes additions of scalars up to 1e-8
    epsilon = torch.full((1,), eps, dtype=input.dtype, device=input.device)
    normal = centered / torch.sqrt((centered * centered).mean(axes, keepdim=True) + epsilon)
    normal = normal if weight is None else normal * weight
    return normal if bias is None else normal + bias
