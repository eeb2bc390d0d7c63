"""Validate an ONNX file for ONNX Runtime, in a separate process with resource limits.

First the file is checked: its size, format, tensors and external data, names, cycles, operators, and whether
its demands are limited. A small file can have functions that expand to billions of nodes, or loops of 10^18
trips; a runtime that opens it would inline every function. Only a valid file is then opened as a session,
which may fold constants without limit.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smelt.core.messages import Message, error_message, messages_to_json
from smelt.core.system import IsolatedProcessError, ProcessLimits, available_bytes, run_isolated
from smelt.runtimes.graph_walk import (
    all_nodes,
    iter_initializers,
    iter_model_tensors,
    node_inputs,
    node_label,
    normalized_domain,
    opset_versions,
    subgraphs,
)
from smelt.runtimes.onnx_import.float_matrices import float_matrices_message
from smelt.runtimes.onnx_import.graph_files import GraphFileError
from smelt.runtimes.onnx_import.signature import GraphSignature

if TYPE_CHECKING:
    from smelt.runtimes.onnx_import.graph_interface import InputShapes

# The imports alone, with room for a small graph; a hostile file gets no more.
_BASE_BYTES = 1_200_000_000
_BASE_SECONDS = 12.0
# factors of a file's bytes: as read, as a message, as a session's weights, and packed
_COPIES = 5
_SECONDS_PER_BYTE = 1 / 20e6
_LARGEST = (1 << 31) - 1  # bytes of a protobuf
_MAX_PROBLEMS = 8
_LFS_POINTER = b"version https://git-lfs"


class GraphValidation(NamedTuple):
    """The result of a validation.

    problems: why the file cannot be used, each with a code and, as its text, the end of a sentence; if there
    are any, the rest is empty.
    files: those next to it that hold weights, by their names. details: opset, nodes, parameters, producer.
    """

    problems: tuple[Message, ...] = ()
    signature: GraphSignature | None = None
    files: tuple[str, ...] = ()
    details: dict[str, Any] | None = None


def validate_graph(path: Path, shapes: InputShapes | None = None) -> GraphValidation:
    """Return the validation of the ONNX file `path`, opened once in a separate process.

    shapes: of inputs that get another one.
    """
    try:
        arguments = [str(path), *([json.dumps(shapes)] if shapes else [])]
        reply = run_isolated(__name__, arguments, validation_limits(path))
    except OSError as error:
        return GraphValidation((error_message("unreadable-file", f"cannot be read: {error.strerror}"),))
    except IsolatedProcessError as error:
        text = f"opening it in ONNX Runtime failed: {error}"
        return GraphValidation((error_message(error.code, text),))
    if reply["problems"]:
        return GraphValidation(tuple(Message(**problem) for problem in reply["problems"]))
    return GraphValidation(
        (), GraphSignature.model_validate(reply["signature"]), tuple(reply["files"]), reply["details"]
    )


def validation_limits(path: Path) -> ProcessLimits:
    """Return the memory and time limits of a process that validates the ONNX file `path`.

    Raises:
        OSError: the file or its folder cannot be read.
    """
    size = path.stat().st_size + sum(
        f.stat().st_size for f in path.parent.iterdir() if _may_hold_weights(f, path)
    )
    memory = min(_BASE_BYTES + _COPIES * size, max(_BASE_BYTES, available_bytes()))
    return ProcessLimits(memory, _BASE_SECONDS + _SECONDS_PER_BYTE * size)


def _may_hold_weights(file: Path, graph: Path) -> bool:
    """Return whether a file next to the graph probably holds its weights, by its name."""
    return file != graph and file.is_file() and (".onnx" in file.name or file.suffix in (".data", ".bin"))


def subprocess_main(arguments: Sequence[str]) -> dict[str, Any]:
    """Validate a file in this process. arguments: its path, and new shapes of inputs, if any, as JSON."""
    from smelt.runtimes.onnx_import.graph_interface import replace_zipmaps, set_input_shapes

    path, shapes = Path(arguments[0]), [json.loads(text) for text in arguments[1:]]
    try:
        model = _parse(path)
        zipmaps = replace_zipmaps(model)
    except GraphFileError as error:
        return {"problems": messages_to_json([error_message(error.code, str(error))])}
    except OSError as error:
        return {
            "problems": messages_to_json(
                [error_message("unreadable-file", f"its file cannot be read: {error}")]
            )
        }
    problems = list(dict.fromkeys(_static_problems(model, path))) or list(_unbounded_problems(model))
    if not problems:
        from smelt.runtimes.onnx_import.graph_files import dominant_float_type

        problems += _session_problems(path, dominant_float_type(model))
    if problems:
        num_unlisted = len(problems) - _MAX_PROBLEMS
        unlisted_messages = (
            [error_message("more-problems", f"and {num_unlisted} more")] if num_unlisted > 0 else []
        )
        return {"problems": messages_to_json([*problems[:_MAX_PROBLEMS], *unlisted_messages])}
    from smelt.runtimes.onnx_import.graph_files import graph_signature

    try:
        for new_shapes in shapes:
            set_input_shapes(model, new_shapes)
    except GraphFileError as error:
        return {"problems": messages_to_json([error_message(error.code, str(error))])}
    return {
        "problems": [],
        "signature": graph_signature(model).model_dump(mode="json"),
        "files": _external_file_names(model),
        "details": _model_details(model) | ({"zipmaps": zipmaps} if zipmaps else {}),
    }


def _parse(path: Path) -> Any:
    """Return the onnx.ModelProto in `path`; external weights are not loaded.

    Raises:
        GraphFileError: it is not an ONNX model, with the reason.
    """
    import onnx

    size = path.stat().st_size
    if not size:
        raise GraphFileError("an empty file", code="empty-file")
    if size > _LARGEST:
        text = f"{size:,} bytes, but protobuf is limited to 2 GB: export it with external weights"
        raise GraphFileError(text, code="file-too-large")
    content = path.read_bytes()
    if content.startswith(_LFS_POINTER):
        raise GraphFileError(
            "a Git LFS pointer, not the model. Fetch it with `git lfs pull`", code="git-lfs-pointer"
        )
    try:
        model = onnx.ModelProto.FromString(content)
    except Exception as error:  # protobuf's own has no base that can be named here
        if "alloc" in str(error).lower():  # the parser exceeded the limit
            raise MemoryError from error
        text = f"not an ONNX file, or truncated ({size:,} bytes). Copy or export it again"
        raise GraphFileError(text, code="damaged-file") from error
    if not model.HasField("graph") or not model.graph.output or not model.ir_version:
        text = f"no graph in it: not an ONNX model, or truncated ({size:,} bytes)"
        raise GraphFileError(text, code="no-graph")
    return model


def _static_problems(model: Any, path: Path) -> Iterator[Message]:
    """Yield what is wrong with a model by static checks."""
    from smelt.runtimes.onnx_import.graph_files import graph_io_problems, tensor_problems

    yield from _version_problems(model)
    yield from tensor_problems(model, path)
    yield from structure_problems(model)
    yield from operator_problems(model, _known_operators())
    yield from graph_io_problems(model)


def _unbounded_problems(model: Any) -> Iterator[Message]:
    """Yield what of an otherwise valid model has no limit."""
    yield from function_expansion_problems(model)
    yield from infinite_loop_problems(model)


def _version_problems(model: Any) -> Iterator[Message]:
    import onnx

    if model.ir_version > onnx.IR_VERSION:
        supported = f"onnx {onnx.__version__} supports {onnx.IR_VERSION} at most"
        text = f"its IR version is {model.ir_version}, but {supported}"
        yield error_message("unsupported-ir-version", text)
    if not model.opset_import:
        text = "it does not declare the opset of its operators (opset_import)"
        yield error_message("missing-opset", text)
    for opset in model.opset_import:
        most = onnx.defs.onnx_opset_version()
        if not normalized_domain(opset.domain) and opset.version > most:
            yield error_message(
                "unsupported-opset",
                f"its operators are of opset {opset.version}, but onnx {onnx.__version__} supports {most} at"
                " most: export it with an older opset",
            )


def _known_operators() -> set[tuple[str, str]]:
    """Return (domain, name) of every operator that the installed ONNX Runtime defines."""
    from onnxruntime.capi import onnxruntime_pybind11_state as runtime

    return {(normalized_domain(s.domain), s.name) for s in runtime.get_all_operator_schema()}


def _session_problems(path: Path, float_type: str | None) -> list[Message]:
    """Return why a session, opened as by the runner, fails. float_type: the type of most weights."""
    from smelt.core.errors import SmeltError
    from smelt.runtimes.onnx_session import is_out_of_memory, open_onnx_session

    try:
        open_onnx_session(path, threads=1)
    except SmeltError as error:
        error_text = " ".join(str(error.__cause__ or error).split())
        if is_out_of_memory(error_text):
            text = "opening it in ONNX Runtime requires more memory than expected for a file of its size"
            return [error_message("memory-limit", text)]
        code, advice = _code_and_advice(error_text, float_type)
        text = f"ONNX Runtime cannot load it: {error_text[:400].rstrip('.')}.{advice}".rstrip(".")
        return [error_message(code, text)]
    return []


def _code_and_advice(message: str, float_type: str | None) -> tuple[str, str]:
    """Return the code of an ONNX Runtime error, and the advice for a known kind of error."""
    if "two nodes with same node name" in message:
        advice = " Give each node a unique name, or none: node.ClearField('name') with the package onnx"
        return "duplicate-node-name", advice
    if "NOT_IMPLEMENTED" not in message:
        return "session-failed", ""
    if float_type in ("bfloat16", "float16", "float64"):
        advice = f" Its weights are {float_type}, unsupported by this operator on the CPU: export in float32"
        return "unsupported-weight-type", advice
    return (
        "unsupported-operator-types",
        " The CPU does not support these types in this operator: export in float32, or with another opset",
    )


def _external_file_names(model: Any) -> list[str]:
    from smelt.runtimes.graph_walk import external_data_fields, is_external

    return sorted(
        {
            external_data_fields(tensor)["location"]
            for tensor in iter_model_tensors(model)
            if is_external(tensor)
        }
    )


def _model_details(model: Any) -> dict[str, Any]:
    from smelt.runtimes.onnx_import.class_outputs import class_outputs
    from smelt.runtimes.onnx_import.graph_files import (
        count_graph_parameters,
        count_quantized_tensors,
        dominant_float_type,
    )

    top_nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    operators = Counter(node.op_type for node in top_nodes)
    sizes = {name: 1 for function in model.functions for name in function.input}  # may be weights
    sizes |= {n.output[0]: _constant_size(n) for n in all_nodes(top_nodes) if n.op_type == "Constant"}
    sizes |= {tensor.name: math.prod(tensor.dims) for tensor in iter_initializers(model.graph)}
    sources = {name: frozenset([name]) for name in sizes}
    _trace_constants(top_nodes, sources)
    inner_nodes = [node for outer in top_nodes for body in subgraphs(outer) for node in body.node]
    inner_nodes = list(all_nodes(inner_nodes))  # of If, Loop and Scan
    producer = f"{model.producer_name} {model.producer_version}".strip()
    return {
        "opset": opset_versions(model).get(""),
        "nodes": len(model.graph.node),
        "parameters": count_graph_parameters(model),
        "producer": producer[:80],
        "operators": dict(operators.most_common()),
        "inner_operators": dict(Counter(node.op_type for node in inner_nodes).most_common()),
        "weights": _weights_by_operator(top_nodes, sources, sizes),
        "inner_weights": _weights_by_operator(inner_nodes, sources, sizes),
        "random": list(random_nodes(model)),
        "class_outputs": class_outputs(model),
        "codes": count_quantized_tensors(model),
        "float_matrices": float_matrices_message([model]),
        "floats": dominant_float_type(model),
    }


def _constant_size(node: Any) -> int:
    return max((math.prod(attribute.t.dims) for attribute in node.attribute), default=1)


def _trace_constants(nodes: Iterable[Any], sources: dict[str, frozenset[str]]) -> None:
    """Add to `sources` the values computed from constants alone, with these: a simplifier folds them."""
    for node in nodes:  # in the order of their computation
        bodies, inputs = subgraphs(node), [name for name in node.input if name]
        if inputs and not bodies and sources.keys() >= {*inputs}:
            sources |= dict.fromkeys(node.output, frozenset().union(*(sources[name] for name in inputs)))
        for body in bodies:
            _trace_constants(body.node, sources)


def _weights_by_operator(
    nodes: Iterable[Any], sources: Mapping[str, frozenset[str]], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return the number of constant values that nodes read, by operator; shared ones count once."""
    names: dict[str, set[str]] = {}
    for node in nodes:
        names.setdefault(node.op_type, set()).update(*(sources.get(name, ()) for name in node.input))
    return {name: sum(sizes[value] for value in values) for name, values in names.items() if values}


_MAX_NODES = 1_000_000  # after inlining of functions; a large language model has 10,000
_MAX_TRIPS = 1_000_000_000  # one second, at a nanosecond each


def function_expansion_problems(model: Any) -> Iterator[Message]:
    """Yield a problem if inlining the functions, none of which is recursive, gives too many nodes."""
    functions = {
        (normalized_domain(function.domain), function.name): function for function in model.functions
    }
    if functions and (count := _expanded_node_count(model.graph.node, functions)) > _MAX_NODES:
        yield error_message(
            "too-many-nodes",
            f"its functions call each other so often that inlining gives {float(count):.3g} nodes; at most"
            f" {_MAX_NODES:,} are supported: export it without functions, or with fewer calls",
        )


def _expanded_node_count(nodes: Sequence[Any], functions: Mapping[tuple[str, str], Any]) -> int:
    """Return the number of nodes after a runtime has inlined all functions."""
    sizes: dict[tuple[str, str], int] = {}

    def expanded_count(inside: Sequence[Any]) -> int | None:
        """Return the number of these nodes; None where that of one of their functions is not known yet."""
        keys = [(normalized_domain(node.domain), node.op_type) for node in all_nodes(inside)]
        if any(key in functions and key not in sizes for key in keys):
            return None
        return sum(sizes.get(key, 1) for key in keys)

    pending = list(functions)
    while pending:  # none is recursive, so each round determines one
        new_sizes = {
            key: size for key in pending if (size := expanded_count(functions[key].node)) is not None
        }
        sizes |= new_sizes
        pending = [key for key in pending if key not in new_sizes]
    return expanded_count(nodes) or 0


def infinite_loop_problems(model: Any) -> Iterator[Message]:
    """Yield the loops that are endless by the file itself: too many trips, without a changing condition.

    Exporters write the largest number where a condition ends the loop; the body then computes
    the condition.
    """
    pending: list[tuple[Any, dict[str, int]]] = [
        (model.graph, {}),
        *((function, {}) for function in model.functions),
    ]
    while pending:
        graph, outer_constants = pending.pop()
        constants = outer_constants | _integer_constants(graph)
        for node in graph.node:
            pending += [(inner, constants) for inner in subgraphs(node)]
            if node.op_type != "Loop" or normalized_domain(node.domain):
                continue
            body = next(a.g for a in node.attribute if a.name == "body")
            num_trips = constants.get(node.input[0]) if node.input and node.input[0] else _MAX_TRIPS + 1
            if num_trips is not None and num_trips > _MAX_TRIPS and not _may_terminate(body):
                code, number = (
                    ("too-many-trips", f"{float(num_trips):.3g} trips")
                    if node.input[0]
                    else ("unlimited-trips", "no number of trips")
                )
                yield error_message(
                    code,
                    f"the node {node_label(node)} has {number}, and its body does not change the condition",
                )


def _integer_constants(graph: Any) -> dict[str, int]:
    """Return the scalar integer constants of a graph, by name."""
    from onnx import TensorProto, numpy_helper

    tensors = [(tensor.name, tensor) for tensor in getattr(graph, "initializer", ())]
    tensors += [
        (node.output[0], attribute.t)
        for node in graph.node
        if node.op_type == "Constant" and node.output
        for attribute in node.attribute
        if attribute.name == "value"
    ]
    scalars = [(n, t) for n, t in tensors if t.data_type == TensorProto.INT64 and not math.prod(t.dims) > 1]
    return {n: int(numpy_helper.to_array(t).reshape(-1)[0]) for n, t in scalars if _is_single_value(t)}


def _is_single_value(tensor: Any) -> bool:
    return math.prod(tensor.dims) == 1 and (len(tensor.raw_data) == 8 or len(tensor.int64_data) == 1)


def _may_terminate(body: Any) -> bool:
    """Return whether the body of a loop computes the condition for its next trip."""
    if len(body.input) < 2 or not body.output:
        return True  # not such a loop: reported elsewhere
    constant_names = {body.input[1].name, *(tensor.name for tensor in body.initializer)}
    for node in body.node:
        if node.op_type == "Constant" or (node.op_type == "Identity" and node.input[0] in constant_names):
            constant_names.update(node.output)
    return body.output[0].name not in constant_names


_MAX_DEPTH = 16  # depth of nested subgraphs
# domains of the standard; ONNX Runtime has almost all operators of the first
ONNX_DOMAINS = ("ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview", "ai.onnx.preview.training")
_RANDOM = (
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
)
_TRAINING_MODE_INPUT = ("Dropout", 2)  # the input with the training mode


def structure_problems(model: Any) -> Iterator[Message]:
    """Yield what is wrong with the graph of an onnx.ModelProto and with its subgraphs."""
    pending: list[tuple[Any, frozenset[str], int]] = [(model.graph, frozenset(), 0)]
    while pending:
        graph, outer_names, depth = pending.pop()
        if depth > _MAX_DEPTH:
            text = f"subgraphs are nested more than {_MAX_DEPTH} deep"
            yield error_message("subgraphs-too-deep", text)
            return
        graph_values = {value.name for value in graph.input} | {t.name for t in graph.initializer}
        graph_values |= {sparse.values.name for sparse in graph.sparse_initializer}
        producers = _producers(graph.node)
        yield from _duplicate_outputs(graph.node, producers, graph_values)
        known_values = graph_values | set(producers) | outer_names
        yield from _undefined_inputs(graph, known_values)
        yield from _find_cycle(graph.node, producers)
        inner = frozenset(known_values)
        for node in graph.node:
            pending += [(subgraph, inner, depth + 1) for subgraph in subgraphs(node)]


def _producers(nodes: Sequence[Any]) -> dict[str, int]:
    """Return the node index of each value by name; the last one of several."""
    return {name: index for index, node in enumerate(nodes) for name in node.output if name}


def _duplicate_outputs(
    nodes: Sequence[Any], producers: Mapping[str, int], input_names: Collection[str]
) -> Iterator[Message]:
    for index, node in enumerate(nodes):
        for name in node.output:
            if name and (producers[name] != index or name in input_names):
                text = f"the value '{name[:80]}' is defined twice, once by the node {node_label(node)}"
                yield error_message("duplicate-value", text)


def _undefined_inputs(graph: Any, known: Collection[str]) -> Iterator[Message]:
    for node in graph.node:
        for name in node.input:
            if name and name not in known:
                text = f"the node {node_label(node)} reads '{name[:80]}', which is not defined in the graph"
                yield error_message("undefined-input", text)
    for value in graph.output:
        if value.name not in known:
            text = f"the graph's output '{value.name[:80]}' is not defined by any node"
            yield error_message("undefined-output", text)


def _find_cycle(nodes: Sequence[Any], producers: Mapping[str, int]) -> Iterator[Message]:
    """Yield the nodes of one cycle, if there is one: they cannot be ordered (Kahn 1962)."""
    before = [{producers[name] for name in node_inputs(node) if name in producers} for node in nodes]
    after: list[list[int]] = [[] for _ in nodes]
    for index, source_indices in enumerate(before):
        for source in source_indices:
            after[source].append(index)
    open_ends = [len(source_indices) for source_indices in before]
    ready_nodes = deque(index for index, count in enumerate(open_ends) if not count)
    num_ordered = 0
    while ready_nodes:
        num_ordered += 1
        for index in after[ready_nodes.popleft()]:
            open_ends[index] -= 1
            if not open_ends[index]:
                ready_nodes.append(index)
    if num_ordered == len(nodes):
        return
    unordered = {index for index, count in enumerate(open_ends) if count}
    node_path: list[int] = []
    index = min(unordered)
    while index not in node_path:
        node_path.append(index)
        index = next(source for source in before[index] if source in unordered)
    names = [
        node_label(nodes[node_index]) for node_index in [*node_path[node_path.index(index) :], index][::-1]
    ]
    cycle_text = " -> ".join(names if len(names) <= 6 else [*names[:3], "...", *names[-2:]])
    yield error_message("cycle", f"its nodes form a cycle: {cycle_text}")


def operator_problems(model: Any, known: Collection[tuple[str, str]]) -> Iterator[Message]:
    """Yield the operators that neither `known` (domain, name) nor the model's own functions define."""
    local_functions = {(normalized_domain(f.domain), f.name): f for f in model.functions}
    first_nodes: dict[tuple[str, str], Any] = {}
    calls: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for key, nodes in [(("", ""), model.graph.node), *((key, f.node) for key, f in local_functions.items())]:
        for node in all_nodes(nodes):
            operator = (normalized_domain(node.domain), node.op_type)
            first_nodes.setdefault(operator, node)
            calls.setdefault(key, set()).add(operator)
    for operator, node in first_nodes.items():
        if operator not in known and operator not in local_functions:
            yield _unknown_operator_problem(operator, node)
    reachable = {
        key: called & set(local_functions) for key, called in calls.items() if key in local_functions
    }
    while leaf_functions := [key for key, called in reachable.items() if not called & reachable.keys()]:
        for key in leaf_functions:
            del reachable[key]
    if reachable:
        names = ", ".join(sorted(name for _, name in reachable)[:4])
        yield error_message("recursive-functions", f"functions of the model are recursive: {names}")


def _unknown_operator_problem(what: tuple[str, str], node: Any) -> Message:
    domain, name = what
    if domain in ONNX_DOMAINS:
        return error_message(
            "missing-operator",
            f"the node {node_label(node)} is {domain}.{name}, which the installed ONNX Runtime does not have."
            f" Export the model with an older opset of {domain}, or without this operator",
        )
    if domain:
        return error_message(
            "custom-operator",
            f"the node {node_label(node)} is the custom operator {domain}.{name}, which ONNX Runtime does not"
            " support. Operator libraries are not loaded; export the model without it",
        )
    return error_message("unknown-operator", f"the node {node_label(node)}: ONNX has no operator {name}")


def random_nodes(model: Any) -> Iterator[str]:
    """Yield the labels of the nodes that draw random numbers, including Dropout in training mode."""
    from onnx.numpy_helper import to_array

    nodes = [*all_nodes(model.graph.node), *(n for f in model.functions for n in all_nodes(f.node))]
    named_tensors = [(tensor.name, tensor) for tensor in model.graph.initializer]
    for node in nodes:
        if node.op_type == "Constant" and node.output:
            named_tensors += [(node.output[0], a.t) for a in node.attribute if a.name == "value"]
    false_constants = {
        n for n, t in named_tensors if t.data_type == 9 and not t.data_location and not any(to_array(t).flat)
    }
    operator, mode_index = _TRAINING_MODE_INPUT
    for node in nodes:
        if normalized_domain(node.domain):
            continue
        trains = (
            node.op_type == operator
            and len(node.input) > mode_index
            and node.input[mode_index] not in ("", *false_constants)
        )
        if node.op_type in _RANDOM or trains:
            yield node_label(node)
