"""Write exported graphs in older opsets of ONNX, for runtimes such as TensorRT 8.

torch exports opset 18 and newer. Most operators of opset 18 have the same form in opset 13; those whose form
changed are rewritten here, and a node that needs a later opset is an error. Layer norms are exported as
elementwise operators below opset 17, which added LayerNormalization.

onnx's version converter (onnx 1.23) is no alternative: it has no rules down from opset 18 for Split, from 15
for Shape and Pow, and from 14 for additions of int64.

Source: https://github.com/onnx/onnx/blob/main/docs/Changelog.md
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from onnx import defs, helper, numpy_helper
from torch import Tensor, nn

from smelt.core.errors import InputError
from smelt.runtimes.graph_walk import normalized_domain

OLDEST_TORCH_OPSET = 18
LAYER_NORM_OPSET = 17
_MAX_NAMED, _INT64_MAX = 3, 2**63 - 1
# attributes whose default is the only form of older opsets; torch writes allowzero for sizes that are not 0
_DROPPED: dict[str, dict[str, Any]] = {
    "Split": {"num_outputs": None},  # without sizes: as many equal parts as outputs
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
        if {a.name for a in node.attribute} - schema.attributes.keys() or len(node.input) > schema.max_input:
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
    axes = node.input[1] if node.op_type.startswith("Reduce") and len(node.input) > schema.max_input else None
    if axes in constants and not values.get("noop_with_empty_axes"):  # axes were an attribute
        del node.input[1]
        removed |= missing & {"noop_with_empty_axes"}
        node.attribute.append(helper.make_attribute("axes", numpy_helper.to_array(constants[axes]).tolist()))
    attributes = [attribute for attribute in node.attribute if attribute.name not in removed]
    del node.attribute[:]
    node.attribute.extend(attributes)
    return [node]


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


@contextmanager
def elementwise_layer_norms(module: nn.Module, opset: int) -> Iterator[None]:
    """Replace layer norms by elementwise operators within the block, if `opset` has no LayerNormalization."""
    norms = [m for m in module.modules() if isinstance(m, nn.LayerNorm)] if opset < LAYER_NORM_OPSET else []
    for norm in norms:
        vars(norm)["forward"] = partial(_layer_norm, norm)
    try:
        yield
    finally:
        for norm in norms:
            vars(norm).pop("forward", None)


def _layer_norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    """Compute a layer norm (Ba et al. 2016, arXiv:1607.06450) over the last dimensions."""
    axes = list(range(-len(module.normalized_shape), 0))
    centered = x - x.mean(axes, keepdim=True)
    normal = centered / torch.sqrt((centered * centered).mean(axes, keepdim=True) + module.eps)
    normal = normal if module.weight is None else normal * module.weight
    return normal if module.bias is None else normal + module.bias
