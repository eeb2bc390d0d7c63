"""Build generation graphs: nodes, loops and branches, operations on logits, generation rules, copied nodes.

Names of a graph and of enclosing graphs are unique together, as ONNX requires.

Logits are large, so operations on them make as few passes as possible.

The generation rules are the same as `smelt.generation.logits_processors` in Python. Rules that depend only on
the number of a step are rows of a table that are added to all scores. Rules that depend on the tokens so far
are computed in each step.

The nodes of one step are copied into the generation graph, each to the outermost possible level.

Shapes: R = rows, T = tokens so far, V = vocabulary, K = different rules, n = tokens of an n-gram.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import numpy as np

from smelt.core.errors import RunError


@dataclass(frozen=True)
class LoopCarried:
    """A value that a loop passes from step to step.

    name: part of its name. initial: the value of the first step. shape: a number or None for each
    dimension; None may differ from step to step.
    """

    name: str
    initial: str
    dtype: Any
    shape: tuple[int | None, ...]


# the results of a step of a loop: whether to continue, and the next value of each carried value
LoopBody = Callable[["GraphBuilder", str, list[str]], tuple[str, list[str]]]
# adds the nodes of a branch; returns its values
Branch = Callable[["GraphBuilder"], list[str]]


# not onnxscript 0.7: a loop of a `script` function carries a fixed number of values, but the number of caches
# depends on the model, and it takes 62 nodes for the 36 of n-grams; its GraphBuilder repeats names in inner
# graphs, which ONNX forbids, and takes 28 times as long per node
class GraphBuilder:
    """Nodes in the order in which they are added; methods return the names of values.

    around: the enclosing graph; None for the outermost. opset: of ONNX's own domain, set by the outermost
    graph. first: prefix of all names, so that the nodes can be added to another graph.
    """

    def __init__(self, around: GraphBuilder | None = None, opset: int = 20, first: str = "") -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._root: GraphBuilder = self if around is None else around._root
        self._first: str = first if around is None else around._first
        self._opset: int = opset if around is None else around._opset
        self._count = 0
        self._constants: dict[tuple[Any, ...], str] = {}

    def new_name(self, prefix: str) -> str:
        """Return a new name that begins with `prefix`."""
        self._root._count += 1
        return f"{self._first}{prefix}_{self._root._count}"

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Append a node of ONNX's own domain; return its output. An empty input is omitted."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        """Append a node with several outputs, as `op`."""
        from onnx import helper

        names = [self.new_name(kind.lower()) for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, self.new_name(f"{kind}.node"), **attributes))
        return names

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        """Return the name of a constant of this graph; equal constants share one."""
        from onnx import numpy_helper

        array = np.asarray(value, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=numpy_helper.from_array(array))
        return self._constants[key]

    def graph(self, name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """Return the onnx.GraphProto; inputs and outputs are ValueInfoProto."""
        from onnx import helper

        return helper.make_graph(self.nodes, name, list(inputs), list(outputs), self.initializers)

    def loop(self, prefix: str, trips: str, carried: Sequence[LoopCarried], body: LoopBody) -> list[str]:
        """Append a Loop that runs at least once; return the carried values after its last step.

        Args:
            prefix: part of its name.
            trips: int64 scalar, the maximum number of steps.
            carried: the values passed from step to step.
            body: adds the nodes of a step; called with a builder of the step's graph, the number of the step
                (int64 scalar) and the names of the carried values.
        """
        body_builder = GraphBuilder(self)
        count, condition = body_builder.new_name("step"), body_builder.new_name("going")
        names = [body_builder.new_name(value.name) for value in carried]
        next_condition, body_outputs = body(body_builder, count, names)
        input_names = {*names, count, condition}
        node_outputs = {name for node in body_builder.nodes for name in node.output}
        results: list[str] = []
        for name in (
            next_condition,
            *body_outputs,
        ):  # each must be a value of the graph itself, without duplicates
            is_new_output = name in node_outputs and name not in results and name not in input_names
            results.append(name if is_new_output else body_builder.op("Identity", name))
        result_types = [(np.bool_, ()), *((value.dtype, value.shape) for value in carried)]
        graph = body_builder.graph(
            prefix,
            [value_info(count, np.int64, ()), value_info(condition, np.bool_, ())]
            + [
                value_info(name, value.dtype, value.shape) for name, value in zip(names, carried, strict=True)
            ],
            [
                value_info(name, dtype, shape)
                for name, (dtype, shape) in zip(results, result_types, strict=True)
            ],
        )
        initial_values = [value.initial for value in carried]
        true_constant = self.const(True, np.bool_)
        return self.ops(
            "Loop", trips, true_constant, *initial_values, outputs=len(initial_values), body=graph
        )

    def if_else(
        self, condition: str, then: Callable[[GraphBuilder], str], other: Callable[[GraphBuilder], str],
        dtype: Any, shape: tuple[int | None, ...],
    ) -> str:  # fmt: skip
        """Append an If: the value of `then` where `condition` (bool scalar) is true, else of `other`."""
        return self.if_else_values(condition, lambda i: [then(i)], lambda i: [other(i)], [(dtype, shape)])[0]

    def if_else_values(
        self, condition: str, then: Branch, other: Branch, types: Sequence[tuple[Any, tuple[int | None, ...]]]
    ) -> list[str]:
        """Append an If with several values, as `if_else`; types: dtype and shape of each."""
        branches = {}
        for key, make_values in (("then_branch", then), ("else_branch", other)):
            branch_builder = GraphBuilder(self)
            names = make_values(branch_builder)
            outputs = [value_info(name, *kind) for name, kind in zip(names, types, strict=True)]
            branches[key] = branch_builder.graph(key, [], outputs)
        return self.ops("If", condition, outputs=len(types), **branches)

    # frequent operations

    def row_count(self, name: str) -> str:
        """Return int64 [1]: the number of rows of a value."""
        return self.op("Shape", name, start=0, end=1)

    def dimension(self, name: str, axis: int) -> str:
        """Return int64 scalar: the size of a value's dimension."""
        return self.op("Squeeze", self.op("Shape", name, start=axis, end=axis + 1), self.const([0]))

    def any_of(self, name: str, axes: Sequence[int] = (), keep: bool = False) -> str:
        """Return bool: whether any is true, over `axes` or over all."""
        return self._reduced("ReduceMax", name, axes, keep)

    def all_of(self, name: str, axes: Sequence[int] = (), keep: bool = False) -> str:
        """Return bool: whether all are true, over `axes` or over all."""
        return self._reduced("ReduceMin", name, axes, keep)

    def _reduced(self, kind: str, name: str, axes: Sequence[int], keep: bool) -> str:
        axes_input = (self.const(list(axes)),) if axes else ()
        if self._opset >= 20:
            return self.op(kind, name, *axes_input, keepdims=int(keep))
        return self.cast(self.op(kind, self.cast(name, np.int32), *axes_input, keepdims=int(keep)), np.bool_)

    def cast(self, name: str, dtype: Any) -> str:
        """Return the value in another type."""
        from onnx import helper

        return self.op("Cast", name, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def value_info(name: str, dtype: Any, shape: Sequence[int | str | None]) -> Any:
    """Return the ValueInfoProto of a graph's input or output."""
    from onnx import helper

    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(shape))


# operators that add a bias [V] while writing their result, and the index of that input
_BIAS_INPUT = {"DynamicQuantizeMatMul": 4, "MatMulNBits": 5}
# Above this number of logits per step, a blocked argmax is faster (measured: 8 rows of 8,000 take 0.7 of the
# time, 32 rows 0.3, one row 1.2; the blocks add six small operators)
_MIN_BLOCKED_LOGITS = 50_000


def add_to_logits(b: GraphBuilder, logits: str, row: str) -> str:
    """Return float32 `logits` [R, V] plus `row` [V], added in the layer that computes them if possible.

    A row of a step's rules excludes tokens (0 or -inf), so the order of sums does not matter.
    """
    producers = {name: node for node in b.nodes for name in node.output}
    node = producers.get(logits)
    while node is not None and node.op_type in {"Squeeze", "Reshape", "Add"}:
        node = producers.get(node.input[0])
    bias_index = _BIAS_INPUT.get(node.op_type) if node is not None else None
    if node is None or bias_index is None:
        return b.op("Add", logits, row)
    node_index = b.nodes.index(node)
    later_nodes = b.nodes[node_index:]
    del b.nodes[node_index:]
    existing_bias = node.input[bias_index] if len(node.input) > bias_index else ""
    bias = b.op("Add", existing_bias, row) if existing_bias else row
    node.input.extend([""] * (bias_index + 1 - len(node.input)))
    node.input[bias_index] = bias
    b.nodes.extend(later_nodes)
    return logits


def use_blocks(b: GraphBuilder, rows: str, vocabulary: int) -> str:
    """Return bool: whether a blocked argmax is faster for int64 [1] `rows` rows."""
    if _block_width(vocabulary) is None:
        return b.const(False, np.bool_)
    return b.op("Greater", b.op("Squeeze", rows, b.const([0])), b.const(_MIN_BLOCKED_LOGITS // vocabulary))


def argmax(b: GraphBuilder, scores: str) -> str:
    """Return int64 [R, 1]: the argmax of each row of float32 `scores` [R, V], the first of equal ones."""
    return b.op("ArgMax", scores, axis=1, keepdims=1)


def blocked_argmax(b: GraphBuilder, scores: str, vocabulary: int) -> str:
    """Return the same as `argmax`, faster for many scores.

    ONNX Runtime's ArgMax compares one number after the other, its ReduceMax many at a time: the maximum of
    each block is computed first, then the block, then the index in it.
    """
    width = _block_width(vocabulary)
    if width is None:
        return argmax(b, scores)
    blocks = b.op("Reshape", scores, b.const([-1, vocabulary // width, width]))
    best = b.op("ArgMax", b.op("ReduceMax", blocks, b.const([2]), keepdims=0), axis=1, keepdims=1)
    index_in_block = b.op("ArgMax", b.op("GatherND", blocks, best, batch_dims=1), axis=1, keepdims=1)
    return b.op("Add", b.op("Mul", best, b.const(width)), index_in_block)


def _block_width(vocabulary: int) -> int | None:
    """Return the width of the blocks, None if no useful size divides the vocabulary."""
    root = isqrt(vocabulary)
    sizes = [n for n in range(max(8, root // 3), 3 * root) if vocabulary % n == 0]
    return min(sizes, key=lambda n: abs(n - root), default=None)


def scatter_to_vocabulary(b: GraphBuilder, scores: str, words: str, vocabulary: int) -> str:
    """Return float32 [R, V]: the scores [R, C] of the tokens int64 [C], and -inf for all others."""
    from onnx import numpy_helper

    nothing = numpy_helper.from_array(np.array([-np.inf], dtype=np.float32))
    shape = b.op("Concat", b.row_count(scores), b.const([vocabulary]), axis=0)
    indices = b.op("Expand", words, b.op("Shape", scores))
    return b.op("ScatterElements", b.op("ConstantOfShape", shape, value=nothing), indices, scores, axis=1)


# inputs of the graph, with dtype and shape
GENERATION_INPUTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "max_new_tokens": (np.int64, ()),
    "eos_token_ids": (np.int64, ("ends",)),
    "pad_token_id": (np.int64, ()),
    "step_rules": (np.int64, ("steps",)),
    "rule_biases": (np.float32, ("rules", "vocabulary")),
    "forced_tokens": (np.int64, ("rules",)),
    "text_rules": (np.bool_, ()),
    "repetition_penalty": (np.float32, ()),
    "no_repeat_ngram_size": (np.int64, ()),
}


@dataclass(frozen=True)
class RuleTables:
    """Tables that the steps look up, computed before the first step.

    last_rule: int64 scalar, the last row of `step_rules`, which applies to all later steps. eos_token_ids:
    bool [V + 1], the end tokens.
    """

    last_rule: str
    eos_token_ids: str


@dataclass(frozen=True)
class StepRule:
    """The rule of a step. number: int64 scalar, the rule's. biases: float32 [V], added to scores."""

    number: str
    biases: str

    def forced_token(self, b: GraphBuilder) -> str:
        """Return int64 scalar: the token that the step is forced to return, or -1."""
        return b.op("Gather", "forced_tokens", self.number, axis=0)


def prepare_rules(b: GraphBuilder, vocabulary: int) -> RuleTables:
    """Append the tables of the steps to the outermost graph; `vocabulary` is V."""
    from onnx import numpy_helper

    none = b.op(
        "ConstantOfShape", b.const([vocabulary + 1]), value=numpy_helper.from_array(np.zeros(1, bool))
    )
    # -1, and other ids outside of the vocabulary, map to the place after the last token
    eos_indices = b.op(
        "Where", b.op("Less", "eos_token_ids", b.const(vocabulary)), "eos_token_ids", b.const(-1)
    )
    true_values = b.op("Expand", b.const(True, np.bool_), b.op("Shape", eos_indices))
    ends = b.op("ScatterElements", none, eos_indices, true_values, axis=0)
    return RuleTables(b.op("Sub", b.dimension("step_rules", 0), b.const(1)), ends)


def step_rule(b: GraphBuilder, rules: RuleTables, step: str, rows: str = "rule_biases") -> StepRule:
    """Return the rule of step `step` (int64 scalar, 0 for the first new token) from the rows of `rows`."""
    rule_index = b.op("Gather", "step_rules", b.op("Min", step, rules.last_rule), axis=0)
    return StepRule(rule_index, b.op("Gather", rows, rule_index, axis=0))


def biases_with_forced_tokens(b: GraphBuilder, vocabulary: int) -> str:
    """Return `rule_biases` in which a row with a forced token excludes all others."""
    forced_column = b.op("Unsqueeze", "forced_tokens", b.const([1]))
    other = b.op(
        "Not", b.op("Equal", b.op("Range", b.const(0), b.const(vocabulary), b.const(1)), forced_column)
    )
    hidden = b.op("Where", other, b.const(-np.inf, np.float32), b.const(0, np.float32))
    return b.op("Where", b.op("GreaterOrEqual", forced_column, b.const(0)), hidden, "rule_biases")


def apply_history_rules(b: GraphBuilder, scores: str, texts: str, mask: str | None) -> str:
    """Return float32 `scores` [R, V] after the rules that depend on the tokens so far.

    Args:
        b: the graph of the step.
        scores: [R, V].
        texts: int64 [R, T], the tokens so far.
        mask: int64 [R, T], 0 where a text's prompt is padded; None if it never is.
    """
    history = texts if mask is None else _without_padding(b, texts, mask)
    return _no_repeat_ngrams(b, _repetition_penalty(b, scores, history), texts)


def is_eos(b: GraphBuilder, rules: RuleTables, tokens: str) -> str:
    """Return bool, of the shape of int64 `tokens`: which of them are end tokens."""
    return b.op("Gather", rules.eos_token_ids, tokens, axis=0)


def _without_padding(b: GraphBuilder, texts: str, mask: str) -> str:
    """Replace padding by the row's last token, which occurs anyway."""
    last = b.op("Slice", texts, b.const([-1]), b.const([2**31]), b.const([1]))
    return b.op("Where", b.op("Equal", mask, b.const(0)), last, texts)


def _repetition_penalty(b: GraphBuilder, scores: str, texts: str) -> str:
    """Make every token of the texts less likely, once (Keskar et al. 2019, arXiv:1909.05858)."""
    token_scores = b.op("GatherElements", scores, texts, axis=1)
    negative = b.op("Less", token_scores, b.const(0, np.float32))
    penalized = b.op(
        "Where",
        negative,
        b.op("Mul", token_scores, "repetition_penalty"),
        b.op("Div", token_scores, "repetition_penalty"),
    )
    return b.op("ScatterElements", scores, texts, penalized, axis=1)


def _no_repeat_ngrams(b: GraphBuilder, scores: str, texts: str) -> str:
    """Forbid every token that would repeat an n-gram; n = 0 forbids nothing."""
    zero, one_constant = b.const(0), b.const(1)
    is_enabled = b.op("Greater", "no_repeat_ngram_size", zero)
    length = b.dimension(texts, 1)
    size = b.op("Where", is_enabled, "no_repeat_ngram_size", b.op("Add", length, one_constant))
    prefix_length = b.op("Sub", size, one_constant)
    windows = b.op("Max", b.op("Sub", length, prefix_length), zero)
    starts = b.op("Unsqueeze", b.op("Range", zero, windows, one_constant), b.const([1]))
    window_indices = b.op("Add", starts, b.op("Range", zero, prefix_length, one_constant))  # [W, n - 1]
    heads = b.op("Gather", texts, window_indices, axis=1)  # [R, W, n - 1]
    # the last n - 1 tokens; if there are fewer, there is no window to compare with
    end = b.op("Max", b.op("Range", b.op("Sub", length, prefix_length), length, one_constant), b.const([0]))
    tail = b.op("Unsqueeze", b.op("Gather", texts, end, axis=1), b.const([1]))
    other = b.cast(b.op("Not", b.op("Equal", heads, tail)), np.int64)
    is_repeated = b.op("Equal", b.op("ReduceSum", other, b.const([2]), keepdims=0), zero)  # [R, W]
    first = b.op("Unsqueeze", b.op("Min", prefix_length, length), b.const([0]))
    banned_tokens = b.op("Slice", texts, first, b.const([2**31]), b.const([1]))
    penalties = b.op("Where", is_repeated, b.const(-np.inf, np.float32), b.const(0, np.float32))
    return b.op("ScatterElements", scores, banned_tokens, penalties, axis=1, reduction="add")


@dataclass
class GraphLevel:
    """A builder, and the names of the step's values in it. Each level is nested in the previous one."""

    builder: GraphBuilder
    names: dict[str, str] = field(default_factory=dict)


class GraphConstants:
    """The constants of an onnx.GraphProto, and what is computed from them alone, except for `excluded`."""

    def __init__(self, graph: Any, excluded: Collection[str] = ()) -> None:
        self._tensors = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in excluded}
        self._made: dict[str, Any] = {}  # nodes that read only constants, by output
        for node in graph.node:
            if all(name in self for name in node.input if name) and not set(node.output) & set(excluded):
                self._made |= dict.fromkeys(node.output, node)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or name in self._made

    def copy_to(self, name: str, level: GraphLevel, prefix: str) -> str:
        """Copy a constant, or the nodes that compute it from constants, to a level; return its name there."""
        import onnx

        if name in level.names:
            return level.names[name]
        if name in self._tensors:
            tensor = onnx.TensorProto()
            tensor.CopyFrom(self._tensors[name])
            tensor.name = level.names[name] = prefix + name
            level.builder.initializers.append(tensor)
            return tensor.name
        node = self._made[name]
        for input_name in filter(None, node.input):
            self.copy_to(input_name, level, prefix)
        _copy_node(node, level, level.names, prefix)
        return level.names[name]

    def is_scalar(self, name: str) -> bool:
        """Return whether a constant is stored as one number without axes."""
        return name in self._tensors and not self._tensors[name].dims

    def transpose_of(self, name: str) -> str | None:
        """Return the name of a matrix's transpose if there is one; the matrix may be computed from it."""
        producer = self._made.get(name)
        if producer is not None and producer.op_type == "Transpose":
            return str(producer.input[0])
        transposes = (n for n in self._made.values() if n.op_type == "Transpose" and n.input[0] == name)
        return next((node.output[0] for node in transposes), None)


def hoist_nodes(graph: Any, levels: Sequence[GraphLevel], prefix: str) -> None:
    """Copy the nodes of an onnx.GraphProto, each to the first level at which all its inputs exist.

    So values that depend only on the source are computed once per batch. Constants, and values computed only
    from them, are placed where they are read, if necessary several times: ONNX Runtime packs no constant that
    is read two levels further inside (measured: a decoding step took twice as long), nor does it round the
    activations then. Only lookups read an outer level's constants. Names get `prefix`; the levels' `names`
    are updated with the new name of each value; existing values are not added again.

    Raises:
        RunError: a node contains a graph.
    """
    existing = names_at(levels)
    # inputs with a default are no constants
    constants = GraphConstants(graph, existing.keys() & {value.name for value in graph.input})
    for node in graph.node:
        if any(attribute.HasField("g") for attribute in node.attribute):
            raise RunError(
                f"{graph.name}: node '{node.name}' contains a subgraph, which the generation loop does not"
                " support. Set generation_graph: false.",
                code="unsupported-graph",
            )
        if all(name in constants or name in existing for name in node.output if name):
            continue
        input_names = [name for name in node.input if name]
        outer_names = {name for name in input_names if name not in constants}
        depth = next(
            level_index
            for level_index in range(len(levels))
            if names_at(levels[: level_index + 1]).keys() >= outer_names
        )
        known = names_at(levels[: depth + 1])
        for name in input_names:
            # gathering from a table, which may be the output layer's too, needs no packing
            if name in constants and not (name in known and node.op_type.startswith("Gather")):
                constants.copy_to(name, levels[depth], f"{prefix}{depth}.")
        _copy_node(node, levels[depth], names_at(levels[: depth + 1]), prefix)


def _copy_node(node: Any, level: GraphLevel, known: Mapping[str, str], prefix: str) -> None:
    import onnx

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = prefix + node.name if node.name else ""  # ONNX allows empty node names
    del copy.input[:], copy.output[:]
    copy.input.extend(known[name] if name else "" for name in node.input)
    copy.output.extend(prefix + name if name else "" for name in node.output)
    level.names |= {name: prefix + name for name in node.output if name}
    level.builder.nodes.append(copy)


def names_at(levels: Sequence[GraphLevel]) -> dict[str, str]:
    """Return the names of the step's values at the last of `levels`."""
    return {name: called for level in levels for name, called in level.names.items()}
