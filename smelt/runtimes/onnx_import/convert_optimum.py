"""Recognize generating graphs in Optimum's layout, and convert them to those of smelt's runners.

No computation changes. Optimum's first decoder computes the keys and values of cross-attention from the
encoder's hidden states; here the encoder's graph computes them, once per text. Its decoder for all later
tokens is also used for the first one: with empty caches (verified by `verify_generator`).

Graphs are onnx.GraphProto, edited including their subgraphs: renaming, resolving branches, extracting parts.
Results are new, or copies.

Missing graphs of a layout are reported:

| layout | files |
|---|---|
| two decoders | encoder_model, decoder_model, decoder_with_past_model |
| one decoder | encoder_model, decoder_model_merged (input `use_cache_branch`) |
| a language model | model, with past_key_values.* |

Source: optimum/onnxruntime/modeling_seq2seq.py and modeling_decoder.py (optimum-onnx 0.1.0).

Shapes: B = batch, L = source length, P = previous tokens, H = heads, d = width of a head, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from smelt.core.errors import InputError
from smelt.runtimes.graph_walk import node_inputs, opset_versions, subgraphs

if TYPE_CHECKING:
    from smelt.runtimes.onnx_import.signature import GraphSignature


ENCODER_GRAPH, FIRST_DECODER_GRAPH, DECODER_WITH_PAST_GRAPH, MERGED_DECODER_GRAPH, MODEL_GRAPH = (
    "encoder_model",
    "decoder_model",
    "decoder_with_past_model",
    "decoder_model_merged",
    "model",
)
USE_CACHE_BRANCH, ENCODER_HIDDEN_STATES = "use_cache_branch", "encoder_hidden_states"
PAST_PREFIX, PRESENT_PREFIX = "past_key_values.", "present."
GeneratorKind = Literal["encoder-decoder", "decoder"]
_EXPORT_COMMAND = "optimum-cli export onnx --model FOLDER --task"


def required_graphs(names: Collection[str]) -> tuple[GeneratorKind, tuple[str, ...]] | str:
    """Return the kind of the graphs `names` (without `.onnx`), and those to read; else an error text."""
    if ENCODER_GRAPH in names:
        if {FIRST_DECODER_GRAPH, DECODER_WITH_PAST_GRAPH} <= set(names):
            return "encoder-decoder", (ENCODER_GRAPH, FIRST_DECODER_GRAPH, DECODER_WITH_PAST_GRAPH)
        if MERGED_DECODER_GRAPH in names:
            return "encoder-decoder", (ENCODER_GRAPH, MERGED_DECODER_GRAPH)
        return _missing_decoder_message(names)
    old = [
        name for name in (FIRST_DECODER_GRAPH, DECODER_WITH_PAST_GRAPH, MERGED_DECODER_GRAPH) if name in names
    ]
    if old:
        return (
            f"{', '.join(f'{name}.onnx' for name in old)} and no {ENCODER_GRAPH}.onnx. For translation or"
            " summarization, copy that file too; otherwise this is Optimum's layout of language models"
            f" before 1.14: export it again, as one model.onnx: {_EXPORT_COMMAND} text-generation-with-past"
            " OUT"
        )
    if MODEL_GRAPH in names:
        return "decoder", (MODEL_GRAPH,)
    return f"no {MODEL_GRAPH}.onnx and no {ENCODER_GRAPH}.onnx"


def _missing_decoder_message(names: Collection[str]) -> str:
    """Return what is missing for an encoder's graph in `names`, and how to export it."""
    export = f"{_EXPORT_COMMAND} text2text-generation-with-past OUT"
    if DECODER_WITH_PAST_GRAPH in names:
        return (
            f"{ENCODER_GRAPH}.onnx and {DECODER_WITH_PAST_GRAPH}.onnx without {FIRST_DECODER_GRAPH}.onnx,"
            " which computes the first token. If smelt wrote this folder, use `smelt package FOLDER --format"
            f" optimum`; otherwise export it again: {export}"
        )
    files = (
        f"{FIRST_DECODER_GRAPH}.onnx only, without caches" if FIRST_DECODER_GRAPH in names else "no decoder"
    )
    return (
        f"{ENCODER_GRAPH}.onnx and {files}: {DECODER_WITH_PAST_GRAPH}.onnx with {FIRST_DECODER_GRAPH}.onnx is"
        f" needed, or {MERGED_DECODER_GRAPH}.onnx. Export it with caches: {export}"
    )


def layout_problems(graph: str, signature: GraphSignature) -> Iterator[str]:
    """Yield why the graph `graph` of a layout has other inputs or outputs than expected."""
    inputs, outputs = ({v.name for v in values} for values in (signature.inputs, signature.outputs))
    required_inputs, required_outputs = (
        _REQUIRED_INPUTS[graph],
        {"last_hidden_state"} if graph == ENCODER_GRAPH else {"logits"},
    )
    if missing := (required_inputs - inputs) | (required_outputs - outputs):
        yield (
            f"no {', '.join(sorted(missing))}; its inputs are {_listed_names(inputs)}, its outputs"
            f" {_listed_names(outputs)}"
        )
        return
    known_inputs = required_inputs | _OPTIONAL_INPUTS[graph]
    if unsupported := sorted(name for name in inputs - known_inputs if not name.startswith(PAST_PREFIX)):
        yield f"its inputs {', '.join(unsupported[:4])} are not supported by smelt"
    if graph != ENCODER_GRAPH and not any(name.startswith(PRESENT_PREFIX) for name in outputs):
        yield (
            f"it returns no caches ({PRESENT_PREFIX}*) for the next token: export it for a task that ends in"
            " -with-past"
        )
    cache_inputs = {name.removeprefix(PAST_PREFIX) for name in inputs if name.startswith(PAST_PREFIX)}
    if graph in (DECODER_WITH_PAST_GRAPH, MERGED_DECODER_GRAPH, MODEL_GRAPH) and not cache_inputs:
        yield f"it takes no caches ({PAST_PREFIX}*): export it with a task that ends in -with-past"
    cache_outputs = {name.removeprefix(PRESENT_PREFIX) for name in outputs if name.startswith(PRESENT_PREFIX)}
    if unreturned := sorted(name for name in cache_inputs - cache_outputs if ".encoder." not in name):
        yield f"it takes {PAST_PREFIX}{unreturned[0]} but does not return {PRESENT_PREFIX}{unreturned[0]}"
    ids = next(value for value in signature.inputs if value.name == "input_ids")
    if ids.dtype != "int64":
        yield f"its input_ids are {ids.dtype}, but must be int64: export it again with int64"


_REQUIRED_INPUTS = {
    ENCODER_GRAPH: {"input_ids", "attention_mask"},
    FIRST_DECODER_GRAPH: {"input_ids", ENCODER_HIDDEN_STATES},
    DECODER_WITH_PAST_GRAPH: {"input_ids"},
    MERGED_DECODER_GRAPH: {"input_ids", ENCODER_HIDDEN_STATES, USE_CACHE_BRANCH},
    MODEL_GRAPH: {"input_ids", "attention_mask"},
}
_OPTIONAL_INPUTS = {
    ENCODER_GRAPH: set[str](),
    FIRST_DECODER_GRAPH: {"encoder_attention_mask"},
    DECODER_WITH_PAST_GRAPH: {"encoder_attention_mask", ENCODER_HIDDEN_STATES},
    MERGED_DECODER_GRAPH: {"encoder_attention_mask"},
    MODEL_GRAPH: {"position_ids", "num_logits_to_keep"},
}


def _listed_names(names: Collection[str]) -> str:
    shown_names = sorted(names)[:6]
    return ", ".join(shown_names) + (" ..." if len(names) > 6 else "")


def copy_message(message: Any) -> Any:
    """Return a copy of a protobuf message."""
    new = type(message)()
    new.CopyFrom(message)
    return new


def rename_values(nodes: Iterable[Any], name_of: Callable[[str], str], prefix: str) -> list[Any]:
    """Return copies of `nodes` whose values have the names of `name_of`; nodes get `prefix`.

    Names inside of subgraphs are changed too, so that they stay unique.
    """
    renamed_nodes = [copy_message(node) for node in nodes]
    for node in renamed_nodes:
        _rename_node(node, name_of, prefix)
    return renamed_nodes


def _rename_node(node: Any, name_of: Callable[[str], str], prefix: str) -> None:
    node.name = prefix + node.name
    for names in (node.input, node.output):
        names[:] = [name and name_of(name) for name in names]
    for graph in subgraphs(node):
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            value.name = name_of(value.name)
        for sparse in graph.sparse_initializer:
            sparse.values.name = name_of(sparse.values.name)
        for subgraph_node in graph.node:
            _rename_node(subgraph_node, name_of, prefix)


def with_name(message: Any, name: str) -> Any:
    """Return a copy of a protobuf message with another name."""
    new = copy_message(message)
    new.name = name
    return new


def nodes_for_outputs(nodes: Iterable[Any], outputs: Iterable[str], stop: str | None = None) -> list[Any]:
    """Return those of the ordered `nodes` that `outputs` depend on; the value `stop` counts as an input."""
    needed_names, needed_nodes = set(outputs), []
    for node in reversed(list(nodes)):
        if needed_names.intersection(node.output) and stop not in node.output:
            needed_nodes.append(node)
            needed_names |= node_inputs(node)
    return needed_nodes[::-1]


def used_tensors(tensors: Iterable[Any], nodes: Iterable[Any], outputs: Collection[str] = ()) -> list[Any]:
    """Return those of `tensors` that `nodes` read, or that are outputs themselves."""
    names = set(outputs).union(*(node_inputs(node) for node in nodes))
    return [tensor for tensor in tensors if tensor.name in names]


def resolve_if_branch(graph: Any, flag: str, value: bool) -> Any:
    """Return a copy of `graph` with the input `flag` set to `value`: the selected branches of If.

    The input is removed, and so are nodes and weights of the other branches only.
    """
    from onnx import helper

    nodes: list[Any] = []
    weights = list(graph.initializer)
    for number, node in enumerate(graph.node):
        if node.op_type != "If" or node.input[0] != flag:
            nodes.append(node)
            continue
        branch_name = "then_branch" if value else "else_branch"
        branch = next(a.g for a in node.attribute if a.name == branch_name)
        branch_nodes, tensors = _inline_branch(branch, list(node.output), f"branch{number}.")
        nodes += branch_nodes
        weights += tensors
    outputs = [o.name for o in graph.output]
    nodes = nodes_for_outputs(nodes, outputs)
    names = set().union(*(node_inputs(node) for node in nodes)) | set(outputs)
    inputs = [i for i in graph.input if i.name != flag and i.name in names]
    return helper.make_graph(
        nodes, graph.name, inputs, list(graph.output), used_tensors(weights, nodes, outputs)
    )


def _inline_branch(branch: Any, outputs: list[str], prefix: str) -> tuple[list[Any], list[Any]]:
    """Return nodes and weights of a branch of If, whose results get the names `outputs`."""
    from onnx import helper

    local_names = {t.name for t in branch.initializer} | {
        name for node in branch.node for name in node.output
    }

    def name_of(name: str) -> str:
        return prefix + name if name in local_names else name

    nodes = rename_values(branch.node, name_of, prefix)
    for value, output in zip(branch.output, outputs, strict=True):
        nodes.append(helper.make_node("Identity", [name_of(value.name)], [output], f"{prefix}{output}"))
    return nodes, [with_name(tensor, prefix + tensor.name) for tensor in branch.initializer]


LAST_HIDDEN_STATE, ATTENTION_MASK, ENCODER_ATTENTION_MASK = (
    "last_hidden_state",
    "attention_mask",
    "encoder_attention_mask",
)
_CROSS, _ROWS = "cross.", "cross.rows"
_SQUEEZE_BY_INPUT = 13  # since this opset axes are an input


def convert_encoder_decoder(parts: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return encoder and decoder for smelt, and Optimum's graph for the first token only.

    Args:
        parts: onnx.ModelProtos by name, of one of the layouts; weights may be
        external.

    Raises:
        InputError: they do not match.
    """
    encoder, merged_decoder = parts[ENCODER_GRAPH], parts.get(MERGED_DECODER_GRAPH)
    if merged_decoder is not None:
        later_graph, first = (_resolve_cache_branch(merged_decoder, value) for value in (True, False))
    else:
        later_graph, first = parts[DECODER_WITH_PAST_GRAPH], parts[FIRST_DECODER_GRAPH]
    opsets = [opset_versions(model) for model in (encoder, first, later_graph)]
    if any(versions != opsets[0] for versions in opsets):
        raise InputError(
            "encoder and decoder have different opsets: export them together",
            code="opset-mismatch",
        )
    cross_caches = [
        i.name.removeprefix(PAST_PREFIX)
        for i in later_graph.graph.input
        if _is_cross_cache(i.name, PAST_PREFIX)
    ]
    return _build_encoder(encoder, first, cross_caches), _build_decoder(later_graph), first


def convert_decoder_only(model: Any) -> Any:
    """Return the graph of a language model for smelt: with position ids, whether it uses them or not.

    Raises:
        InputError: its caches are int8.
    """
    from onnx import TensorProto, helper

    graph = model.graph
    inputs = [copy_message(value) for value in graph.input]
    caches = [value for value in inputs if value.name.startswith(PAST_PREFIX)]
    if any(value.type.tensor_type.elem_type == TensorProto.INT8 for value in caches):
        raise InputError(
            "its caches are int8, and their rounding prevents checking one call against several:"
            " start from the folder with weights, or from a graph with float caches",
            code="unsupported-cache",
        )
    if all(value.name != "position_ids" for value in inputs):
        inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, [None, None]))
    sizes = {
        "input_ids": ("batch", "sequence_length"), "position_ids": ("batch", "sequence_length"),
        ATTENTION_MASK: ("batch", "total_sequence_length"),
    }  # fmt: skip
    for value in inputs:
        _name_dimensions(value, sizes.get(value.name), "past_sequence_length")
    outputs = [o for o in graph.output if o.name == "logits" or o.name.startswith(PRESENT_PREFIX)]
    return _make_model(
        model, nodes_for_outputs(graph.node, [o.name for o in outputs]), inputs, outputs, graph.initializer
    )


def set_cache_shapes(model: Any, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Write the heads and the width of each cache into the inputs of `model`, in place of dimension names."""
    for value in model.graph.input:
        if value.name in shapes:
            dims = value.type.tensor_type.shape.dim
            dims[1].dim_value, dims[3].dim_value = shapes[value.name]


def _resolve_cache_branch(model: Any, value: bool) -> Any:
    from onnx import helper

    graph = resolve_if_branch(model.graph, USE_CACHE_BRANCH, value)
    if any(USE_CACHE_BRANCH in node_inputs(node) for node in graph.node):
        raise InputError(
            f"{MERGED_DECODER_GRAPH}.onnx: {USE_CACHE_BRANCH} selects something other than branches of If",
            code="unsupported-graph",
        )
    return helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=model.ir_version)


def _build_encoder(encoder: Any, first: Any, wanted: list[str]) -> Any:
    """Return the encoder with the keys and values of its hidden states, `present.{i}.encoder.*`."""
    from onnx import TensorProto, helper, numpy_helper

    names = {f"{PRESENT_PREFIX}{name}" for name in wanted}
    outputs = [o for o in first.graph.output if o.name in names]
    if len(outputs) != len(names):
        raise InputError(
            "the decoder needs the encoder's keys and values, which its first graph does not return:"
            " export both together",
            code="missing-cache",
        )
    projection_nodes = nodes_for_outputs(first.graph.node, names)
    new_names = {
        ENCODER_HIDDEN_STATES: LAST_HIDDEN_STATE,
        ENCODER_ATTENTION_MASK: ATTENTION_MASK,
        "input_ids": _ROWS,
    } | {name: name for name in names}
    projections = rename_values(projection_nodes, lambda name: new_names.get(name, _CROSS + name), _CROSS)
    weights = [copy_message(tensor) for tensor in used_tensors(first.graph.initializer, projection_nodes)]
    for tensor in weights:
        tensor.name = new_names.get(tensor.name, _CROSS + tensor.name)
    if any("input_ids" in node_inputs(node) for node in projection_nodes):
        # keys and values can only depend on the number of rows of the decoder's tokens
        import numpy as np

        slice_inputs = {
            f"{_ROWS}.{suffix}": np.array([n]) for suffix, n in (("start", 0), ("end", 1), ("axis", 1))
        }
        weights += [numpy_helper.from_array(value, name) for name, value in slice_inputs.items()]
        projections.insert(0, helper.make_node("Slice", [ATTENTION_MASK, *slice_inputs], [_ROWS], _ROWS))
    graph = encoder.graph
    inputs = [copy_message(value) for value in graph.input]
    if all(value.name != ATTENTION_MASK for value in inputs):
        inputs.append(helper.make_tensor_value_info(ATTENTION_MASK, TensorProto.INT64, [None, None]))
    for value in inputs:
        _name_dimensions(value, ("batch", "encoder_length"), "")
    encoder_nodes = nodes_for_outputs(graph.node, [LAST_HIDDEN_STATE])
    hidden_outputs = [o for o in graph.output if o.name == LAST_HIDDEN_STATE]
    return _make_model(
        encoder,
        [*encoder_nodes, *projections],
        inputs,
        [*hidden_outputs, *outputs],
        [*graph.initializer, *weights],
    )


def _build_decoder(later: Any) -> Any:
    """Return the decoder's step: logits [B, V], caches of any length."""
    from onnx import TensorProto, helper

    graph = later.graph
    outputs = [
        copy_message(o)
        for o in graph.output
        if o.name == "logits" or (o.name.startswith(PRESENT_PREFIX) and ".encoder." not in o.name)
    ]
    nodes = [copy_message(node) for node in nodes_for_outputs(graph.node, [o.name for o in outputs])]
    if any(ENCODER_HIDDEN_STATES in node_inputs(node) for node in nodes):
        raise InputError(
            f"its decoder reads {ENCODER_HIDDEN_STATES} at every token instead of cached keys and"
            " values: export it with caches",
            code="unsupported-graph",
        )
    weights = list(graph.initializer)
    nodes += _squeeze_logits(nodes, outputs, weights, later)
    inputs = [copy_message(i) for i in graph.input if i.name != ENCODER_HIDDEN_STATES]
    if all(value.name != ENCODER_ATTENTION_MASK for value in inputs):
        inputs.append(helper.make_tensor_value_info(ENCODER_ATTENTION_MASK, TensorProto.INT64, [None, None]))
    sizes: dict[str, tuple[str | int, ...]] = {
        ENCODER_ATTENTION_MASK: ("batch", "encoder_length"),
        "input_ids": ("batch", 1),
    }
    for value in inputs:
        length_name = "encoder_length" if _is_cross_cache(value.name, PAST_PREFIX) else "past_length"
        _name_dimensions(value, sizes.get(value.name), length_name)
    return _make_model(later, nodes, inputs, outputs, weights)


def _squeeze_logits(nodes: list[Any], outputs: list[Any], weights: list[Any], model: Any) -> list[Any]:
    """Change `logits` from [B, 1, V] to [B, V], in place; return the node to be added."""
    import numpy as np
    from onnx import helper, numpy_helper

    used_names = {name for node in nodes for name in (node.name, *node.output)} | {w.name for w in weights}
    squeezed_input, axis, squeeze = (
        _unused_name(f"one_token.{suffix}", used_names) for suffix in ("logits", "axis", "squeeze")
    )
    for node in nodes:
        for names in (node.input, node.output):
            names[:] = [squeezed_input if name == "logits" else name for name in names]
    shape = next(o for o in outputs if o.name == "logits").type.tensor_type.shape
    if len(shape.dim) == 3:
        del shape.dim[1]
    if opset_versions(model).get("", _SQUEEZE_BY_INPUT) < _SQUEEZE_BY_INPUT:
        return [helper.make_node("Squeeze", [squeezed_input], ["logits"], squeeze, axes=[1])]
    weights.append(numpy_helper.from_array(np.array([1]), axis))
    return [helper.make_node("Squeeze", [squeezed_input, axis], ["logits"], squeeze)]


def _unused_name(name: str, known: set[str]) -> str:
    """Return `name`, extended if it exists: a graph that smelt packaged may be imported again."""
    return name if name not in known else _unused_name(f"{name}_", known)


def _name_dimensions(value: Any, sizes: tuple[str | int, ...] | None, past: str) -> None:
    """Rename the dimensions of an input as in smelt's own graphs."""
    dims = value.type.tensor_type.shape.dim
    dimensions: tuple[tuple[int, str | int], ...] = ()
    if value.name.startswith(PAST_PREFIX) and len(dims) == 4:
        dimensions = ((0, "batch"), (2, past))
    elif sizes is not None and len(dims) == len(sizes):
        dimensions = tuple(enumerate(sizes))
    for axis_index, size in dimensions:
        if isinstance(size, int):
            dims[axis_index].dim_value = size
        else:
            dims[axis_index].dim_param = size


def _make_model(
    like: Any, nodes: Iterable[Any], inputs: list[Any], outputs: list[Any], weights: Iterable[Any]
) -> Any:
    from onnx import helper

    node_list = list(nodes)
    names = {o.name for o in outputs}
    graph = helper.make_graph(node_list, "graph", inputs, outputs, used_tensors(weights, node_list, names))
    return helper.make_model(graph, opset_imports=list(like.opset_import), ir_version=like.ir_version)


def _is_cross_cache(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and ".encoder." in name
