"""Infer the type of each value of a graph, also in If, Loop and Scan, and the types an operator supports.

The supported types are in an operator's definition: onnx's, or ONNX Runtime's for its own operators. An input
or output has one type, or a type variable that it shares with others; so if an input becomes float16, an
output of the same variable does, but an output whose type an attribute sets (HannWindow, EyeLike,
LayerNormalization's mean) does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from smelt.quantization.scheme import NVIDIA_DOMAIN
from smelt.quantization.schemes.nvfp4 import DYNAMIC_QUANTIZE
from smelt.runtimes.graph_walk import normalized_domain, opset_versions, subgraphs

# operators with supported inner graphs; those of others (BeamSearch) are not changed
CONTROL_FLOW_OPS = ("If", "Loop", "Scan")
_TENSOR = "tensor("
_FLOAT4_OUTPUTS = ("tensor(float4e2m1)", "tensor(float8e4m3fn)")
_FLOAT_TENSORS = frozenset({"tensor(float)", "tensor(float16)", "tensor(bfloat16)"})


class TypeSlot(NamedTuple):
    """An input or output of an operator. type_variable: its type or variable. allowed: types."""

    type_variable: str
    allowed: frozenset[str]

    @property
    def is_fixed(self) -> bool:
        """Whether it has one type, independent of the others."""
        return "(" in self.type_variable

    def accepts(self, kind: int) -> bool:
        """Return whether it may be a tensor of the type `kind`, a number of onnx.TensorProto."""
        return tensor_type_name(kind) in self.allowed


class NodeTypes(NamedTuple):
    """The inputs and outputs of a node."""

    inputs: tuple[TypeSlot, ...]
    outputs: tuple[TypeSlot, ...]

    @property
    def all_tensors(self) -> bool:
        """Whether all inputs and outputs are tensors; else there are sequences, maps or optional values."""
        return all(
            any(type_name.startswith(_TENSOR) for type_name in slot.allowed)
            for slot in (*self.inputs, *self.outputs)
        )


@cache
def tensor_type_name(kind: int) -> str:
    """Return the name of a tensor of the type `kind` in a definition."""
    from onnx import TensorProto

    return f"{_TENSOR}{TensorProto.DataType.Name(kind).lower()})"


def is_control_flow(node: Any) -> bool:
    """Return whether a node is ONNX's If, Loop or Scan."""
    return node.op_type in CONTROL_FLOW_OPS and not normalized_domain(node.domain)


def node_key(node: Any) -> str:
    """Return the key of a node: the name of its first output."""
    return next((name for name in node.output if name), "")


def node_types(node: Any, opsets: Mapping[str, int]) -> NodeTypes | None:
    """Return the inputs and outputs that a node has; None if its operator is unknown."""
    schema = _op_schema(
        normalized_domain(node.domain), node.op_type, opsets.get(normalized_domain(node.domain), 1)
    )
    if schema is None:
        return None
    inputs, outputs = schema
    slots = NodeTypes(
        _expand_parameters(inputs, len(node.input)), _expand_parameters(outputs, len(node.output))
    )
    fits = len(slots.inputs) == len(node.input) and len(slots.outputs) == len(node.output)
    return slots if fits else None


class _OpParameter(NamedTuple):
    slot: TypeSlot
    variadic: bool
    alike: bool


def _expand_parameters(parameters: Sequence[_OpParameter], count: int) -> tuple[TypeSlot, ...]:
    """Return the slots of `count` inputs or outputs: the last parameter may be variadic."""
    slots = [parameter.slot for parameter in parameters[:count]]
    last = parameters[-1] if parameters else None
    while last is not None and last.variadic and len(slots) < count:
        type_variable = last.slot.type_variable if last.alike else f"{last.slot.type_variable}{len(slots)}"
        slots.append(TypeSlot(type_variable, last.slot.allowed))
    return tuple(slots)


@cache
def _op_schema(domain: str, name: str, version: int) -> tuple[tuple[_OpParameter, ...], ...] | None:
    """Return the parameters for inputs and outputs of an operator."""
    from onnx import defs

    if (domain, name) == (NVIDIA_DOMAIN, DYNAMIC_QUANTIZE):
        floats = _OpParameter(TypeSlot("T", _FLOAT_TENSORS), variadic=False, alike=True)
        slots = [TypeSlot(kind, frozenset({kind})) for kind in _FLOAT4_OUTPUTS]
        return (floats, floats), tuple(floats._replace(slot=slot) for slot in slots)
    try:
        schema = defs.get_schema(name, version, domain)
    except defs.SchemaError:
        return _runtime_op_schema(domain, name, version)
    allowed_types = {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints}
    return tuple(
        tuple(
            _OpParameter(
                TypeSlot(p.type_str, allowed_types.get(p.type_str, frozenset({p.type_str}))),
                p.option == defs.OpSchema.FormalParameterOption.Variadic,
                p.is_homogeneous,
            )
            for p in parameters
        )
        for parameters in (schema.inputs, schema.outputs)
    )


def _runtime_op_schema(domain: str, name: str, version: int) -> tuple[tuple[_OpParameter, ...], ...] | None:
    """Return the same for an operator that only ONNX Runtime defines."""
    schemas = [
        schema for schema in _runtime_schemas().get((domain, name), ()) if schema.since_version <= version
    ]
    if not schemas:
        return None
    newest = max(schemas, key=lambda schema: schema.since_version)
    allowed_types = {c.type_param_str: frozenset(c.allowed_type_strs) for c in newest.type_constraints}
    return tuple(
        tuple(
            _OpParameter(
                TypeSlot(p.typeStr, allowed_types.get(p.typeStr, frozenset({p.typeStr}))),
                str(p.option).endswith("Variadic"),
                p.isHomogeneous,
            )
            for p in parameters
        )
        for parameters in (newest.inputs, newest.outputs)
    )


@cache
def _runtime_schemas() -> dict[tuple[str, str], list[Any]]:
    from onnxruntime.capi import onnxruntime_pybind11_state as runtime

    schemas: dict[tuple[str, str], list[Any]] = {}
    for schema in runtime.get_all_operator_schema():
        schemas.setdefault((normalized_domain(schema.domain), schema.name), []).append(schema)
    return schemas


def value_types(model: Any) -> dict[str, int]:
    """Return the element type of each tensor by its name; names in inner graphs must be unique."""
    import onnx
    from onnx import helper

    # a copy without weights, which may exceed the protobuf limit; types do not depend on them
    graph = model.graph
    weights = [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in graph.initializer]
    input_names = {value.name for value in graph.input}
    inputs = [*graph.input, *(value for value in weights if value.name not in input_names)]
    light = helper.make_graph(graph.node, "types", inputs, graph.output, value_info=graph.value_info)
    light_model = helper.make_model(light, opset_imports=model.opset_import, ir_version=model.ir_version)
    inferred = onnx.shape_inference.infer_shapes(light_model).graph
    types: dict[str, int] = {}
    _record_types(types, (*inferred.input, *inferred.value_info, *inferred.output))
    _infer_graph(
        graph, types, opset_versions(model)
    )  # types that onnx does not infer: values of inner graphs and of other domains' operators
    return types


def values_of_type(model: Any, kind: int | None = None) -> set[str]:
    """Return the names of all values of a type, float32 by default: inputs, weights, outputs of nodes."""
    from onnx import TensorProto

    kind = TensorProto.FLOAT if kind is None else kind
    return {name for name, value_type in value_types(model).items() if value_type == kind}


def _record_types(types: dict[str, int], values: Sequence[Any]) -> None:
    for value in values:
        if value.type.tensor_type.elem_type:
            types[value.name] = value.type.tensor_type.elem_type


def _infer_graph(graph: Any, types: dict[str, int], opsets: Mapping[str, int]) -> None:
    _record_types(types, (*graph.input, *graph.value_info))
    types.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
    for node in graph.node:
        bodies = subgraphs(node)
        for body in bodies:
            body_inputs = {"Loop": ["", "", *node.input[2:]], "Scan": list(node.input)}.get(node.op_type, [])
            for value, name in zip(body.input, body_inputs, strict=False):
                if name in types and not value.type.tensor_type.elem_type:
                    types[value.name] = types[name]
            _infer_graph(body, types, opsets)
        if bodies and is_control_flow(node):
            ends = [value.name for value in bodies[0].output][node.op_type == "Loop" :]
            output_kinds = {
                name: types[end] for name, end in zip(node.output, ends, strict=False) if end in types
            }
        elif any(name and name not in types for name in node.output):
            output_kinds = output_types(node, node_types(node, opsets), types, opsets)
        else:
            continue
        types.update((name, kind) for name, kind in output_kinds.items() if name and name not in types)
    # declared types of an inner graph's outputs, if nothing else is known
    _record_types(types, [value for value in graph.output if value.name not in types])


def output_types(
    node: Any, slots: NodeTypes | None, types: Mapping[str, int], opsets: Mapping[str, int]
) -> dict[str, int]:
    """Return the types of a node's outputs, as far as they follow from the `types` of its inputs."""
    if slots is None:
        return {}
    from onnx import TensorProto

    type_ids = {tensor_type_name(kind): kind for kind in TensorProto.DataType.values() if kind}
    type_variables = {
        slot.type_variable: types[name]
        for name, slot in zip(node.input, slots.inputs, strict=False)
        if name in types
    }
    result, has_unknown = {}, False
    for name, slot in zip(node.output, slots.outputs, strict=False):
        kind = type_ids.get(slot.type_variable) if slot.is_fixed else type_variables.get(slot.type_variable)
        if kind is not None:
            result[name] = kind
        has_unknown |= bool(name) and kind is None
    return _infer_node(node, types, opsets) | result if has_unknown else result


def _infer_node(node: Any, types: Mapping[str, int], opsets: Mapping[str, int]) -> dict[str, int]:
    """Return the types that onnx infers for a single node, whose attributes may set a type."""
    import onnx
    from onnx import helper

    domain = normalized_domain(node.domain)
    input_types = {
        name: helper.make_tensor_type_proto(types[name], None) for name in node.input if name in types
    }
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), domain)
        inferred = onnx.shape_inference.infer_node_outputs(
            schema, node, input_types, opset_imports=[helper.make_opsetid(d, v) for d, v in opsets.items()]
        )
    except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError, KeyError, RuntimeError):
        return {}
    return {
        name: value.tensor_type.elem_type for name, value in inferred.items() if value.tensor_type.elem_type
    }
