"""Of which type each value of a graph is, those in If, Loop and Scan too, and which types an operator takes.

What an operator takes stands in its definition: onnx's, or ONNX Runtime's for its own operators. An input or
output has one type, or a variable that all of its places share; so where an input becomes float16, an output
of the same variable does, and one that an attribute decides (HannWindow, EyeLike, LayerNormalization's mean)
does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from smelt.runtime.foreign.structure import domain_of, inner_graphs

# operators with graphs whose inputs and outputs are known; of others (BeamSearch) nothing is changed inside
CONTROL = ("If", "Loop", "Scan")
_TENSOR = "tensor("


class Slot(NamedTuple):
    """A place of an operator. word: its one type or its variable. allowed: types, as `tensor(float16)`."""

    word: str
    allowed: frozenset[str]

    @property
    def fixed(self) -> bool:
        """Whether it has one type, whatever the others have."""
        return "(" in self.word

    def takes(self, kind: int) -> bool:
        """Say whether it may be a tensor of the type `kind`, a number of onnx.TensorProto."""
        return type_word(kind) in self.allowed


class Slots(NamedTuple):
    """The places of a node."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    @property
    def tensors(self) -> bool:
        """Whether it reads and gives tensors alone; else sequences, maps or optional values."""
        return all(
            any(word.startswith(_TENSOR) for word in slot.allowed) for slot in (*self.inputs, *self.outputs)
        )


@cache
def type_word(kind: int) -> str:
    """Return how a definition calls a tensor of the type `kind`."""
    from onnx import TensorProto

    return f"{_TENSOR}{TensorProto.DataType.Name(kind).lower()})"


def is_control(node: Any) -> bool:
    """Say whether a node is ONNX's If, Loop or Scan."""
    return node.op_type in CONTROL and not domain_of(node.domain)


def key_of(node: Any) -> str:
    """Return the name by which a node is known: the first value that it gives."""
    return next((name for name in node.output if name), "")


def graphs_of(graph: Any) -> Iterator[Any]:
    """Yield a graph, and those inside of its nodes."""
    yield graph
    for node in graph.node:
        for inside in inner_graphs(node):
            yield from graphs_of(inside)


def opsets_of(model: Any) -> dict[str, int]:
    """Return the version of each domain's operators, ONNX's own under the empty name."""
    return {domain_of(said.domain): said.version for said in model.opset_import}


def slots_of(node: Any, opsets: Mapping[str, int]) -> Slots | None:
    """Return the places of a node that it has; None where nobody here knows its operator."""
    schema = _schema(domain_of(node.domain), node.op_type, opsets.get(domain_of(node.domain), 1))
    if schema is None:
        return None
    inputs, outputs = schema
    slots = Slots(_places(inputs, len(node.input)), _places(outputs, len(node.output)))
    fits = len(slots.inputs) == len(node.input) and len(slots.outputs) == len(node.output)
    return slots if fits else None


class _Parameter(NamedTuple):
    slot: Slot
    variadic: bool
    alike: bool


def _places(parameters: Sequence[_Parameter], count: int) -> tuple[Slot, ...]:
    """Return the slots of `count` places: the last parameter may stand for many."""
    found = [parameter.slot for parameter in parameters[:count]]
    last = parameters[-1] if parameters else None
    while last is not None and last.variadic and len(found) < count:
        word = last.slot.word if last.alike else f"{last.slot.word}{len(found)}"
        found.append(Slot(word, last.slot.allowed))
    return tuple(found)


@cache
def _schema(domain: str, name: str, version: int) -> tuple[tuple[_Parameter, ...], ...] | None:
    """Return the parameters for inputs and outputs of an operator."""
    from onnx import defs

    try:
        said = defs.get_schema(name, version, domain)
    except defs.SchemaError:
        return _of_runtime(domain, name, version)
    kinds = {c.type_param_str: frozenset(c.allowed_type_strs) for c in said.type_constraints}
    return tuple(
        tuple(
            _Parameter(
                Slot(p.type_str, kinds.get(p.type_str, frozenset({p.type_str}))),
                p.option == defs.OpSchema.FormalParameterOption.Variadic,
                p.is_homogeneous,
            )
            for p in parameters
        )
        for parameters in (said.inputs, said.outputs)
    )


def _of_runtime(domain: str, name: str, version: int) -> tuple[tuple[_Parameter, ...], ...] | None:
    """Return the same of an operator that ONNX Runtime alone defines."""
    said = [
        schema for schema in _runtime_schemas().get((domain, name), ()) if schema.since_version <= version
    ]
    if not said:
        return None
    newest = max(said, key=lambda schema: schema.since_version)
    kinds = {c.type_param_str: frozenset(c.allowed_type_strs) for c in newest.type_constraints}
    return tuple(
        tuple(
            _Parameter(
                Slot(p.typeStr, kinds.get(p.typeStr, frozenset({p.typeStr}))),
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

    found: dict[tuple[str, str], list[Any]] = {}
    for schema in runtime.get_all_operator_schema():
        found.setdefault((domain_of(schema.domain), schema.name), []).append(schema)
    return found


def value_types(model: Any) -> dict[str, int]:
    """Return the element type of each tensor by its name; names in inner graphs must be of one value each."""
    import onnx
    from onnx import helper

    # a copy without weights, which may be more than one protobuf holds; types do not depend on them
    graph = model.graph
    weights = [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in graph.initializer]
    there = {value.name for value in graph.input}
    inputs = [*graph.input, *(value for value in weights if value.name not in there)]
    light = helper.make_graph(graph.node, "types", inputs, graph.output, value_info=graph.value_info)
    bare = helper.make_model(light, opset_imports=model.opset_import, ir_version=model.ir_version)
    inferred = onnx.shape_inference.infer_shapes(bare).graph
    types: dict[str, int] = {}
    _note(types, (*inferred.input, *inferred.value_info, *inferred.output))
    _walk(
        graph, types, opsets_of(model)
    )  # what onnx does not know: values of inner graphs and of others' operators
    return types


def _note(types: dict[str, int], values: Sequence[Any]) -> None:
    for value in values:
        if value.type.tensor_type.elem_type:
            types[value.name] = value.type.tensor_type.elem_type


def _walk(graph: Any, types: dict[str, int], opsets: Mapping[str, int]) -> None:
    _note(types, (*graph.input, *graph.value_info))
    types.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
    for node in graph.node:
        bodies = inner_graphs(node)
        for body in bodies:
            given = {"Loop": ["", "", *node.input[2:]], "Scan": list(node.input)}.get(node.op_type, [])
            for value, name in zip(body.input, given, strict=False):
                if name in types and not value.type.tensor_type.elem_type:
                    types[value.name] = types[name]
            _walk(body, types, opsets)
        if bodies and is_control(node):
            ends = [value.name for value in bodies[0].output][node.op_type == "Loop" :]
            found = {name: types[end] for name, end in zip(node.output, ends, strict=False) if end in types}
        elif any(name and name not in types for name in node.output):
            found = given_types(node, slots_of(node, opsets), types, opsets)
        else:
            continue
        types.update((name, kind) for name, kind in found.items() if name and name not in types)
    # what an inner graph says of its ends where nothing else is known
    _note(types, [value for value in graph.output if value.name not in types])


def given_types(
    node: Any, slots: Slots | None, types: Mapping[str, int], opsets: Mapping[str, int]
) -> dict[str, int]:
    """Return the types of what a node gives, as far as they follow from `types`, those of what it reads."""
    if slots is None:
        return {}
    from onnx import TensorProto

    numbers = {type_word(kind): kind for kind in TensorProto.DataType.values() if kind}
    bound = {
        slot.word: types[name] for name, slot in zip(node.input, slots.inputs, strict=False) if name in types
    }
    found, left = {}, False
    for name, slot in zip(node.output, slots.outputs, strict=False):
        kind = numbers.get(slot.word) if slot.fixed else bound.get(slot.word)
        if kind is not None:
            found[name] = kind
        left |= bool(name) and kind is None
    return _inferred(node, types, opsets) | found if left else found


def _inferred(node: Any, types: Mapping[str, int], opsets: Mapping[str, int]) -> dict[str, int]:
    """Return what onnx finds for a node alone: its attributes may say a type."""
    import onnx
    from onnx import helper

    domain = domain_of(node.domain)
    known = {name: helper.make_tensor_type_proto(types[name], None) for name in node.input if name in types}
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), domain)
        found = onnx.shape_inference.infer_node_outputs(
            schema, node, known, opset_imports=[helper.make_opsetid(d, v) for d, v in opsets.items()]
        )
    except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError, KeyError, RuntimeError):
        return {}
    return {name: value.tensor_type.elem_type for name, value in found.items() if value.tensor_type.elem_type}
