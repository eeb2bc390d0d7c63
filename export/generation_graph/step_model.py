"""Models as the search sees them: first inputs, state of a step, values shared by all steps.

The output layer can be restricted to the shortlist of the source tokens of a batch. Before the loop, its
table gives the tokens that may occur in any row of the batch. The matrix rows of these tokens are gathered
once; a step multiplies only with them, and tokens of other sentences are excluded.

    words   = the table's entries for all tokens of the batch, and the always allowed tokens   int64 [C]
    hidden  = 0 if the row's own source has the token in its list, else -inf                   float32 [B, C]
    logits  = x W[words]^T + bias[words] + hidden                                              float32 [R, C]

Integer matrix multiplications remain integer: ONNX Runtime multiplies with gathered weights as with constant
ones, with the same bits. MatMulNBits requires constants, so its gathered weights become float32.

Shapes: B = sentences, R = rows (sentences, times beams), L = source length, P = cached tokens, H = heads,
d = width of a head, V = (target) vocabulary. S = new tokens; of a shortlist: S = source vocabulary,
n = candidates per source token, C = remaining tokens, K = inputs of the layer, g = group, G = groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from smelt.core.errors import RunError
from smelt.export.generation_graph.beam_attention import (
    BeamQueries,
    SentenceState,
    cached_lengths,
    first_table,
)
from smelt.export.generation_graph.graph_builder import (
    GraphBuilder,
    GraphConstants,
    GraphLevel,
    LoopCarried,
    hoist_nodes,
    names_at,
)
from smelt.generation.config import ALWAYS_TENSOR, TABLE_TENSOR
from smelt.models.text_rules import SHORTLIST_FILE

# operators that compute logits, and their inputs with a vocabulary axis, with that axis
_VOCABULARY_AXES: dict[str, dict[int, int]] = {
    "Gemm": {1: 0, 2: 0},  # the matrix as stored in torch; of another, the axis is 1
    "MatMul": {1: 1},
    "MatMulNBits": {1: 0, 2: 0, 3: 0, 5: 0},
    "DynamicQuantizeMatMul": {1: 1, 2: 0, 3: 0, 4: 0},
    "MatMulIntegerToFloat": {1: 1, 3: 0, 5: 0, 6: 0},
}
_PREFIX = "head."
_TINY = 1e-30


@dataclass(frozen=True)
class ShortlistTokens:
    """token_ids: int64 [C], ascending. excluded: float32 [B, C]. Names in the outermost graph."""

    token_ids: str
    excluded: str


def gather_shortlist(b: GraphBuilder, folder: Path, vocabulary: int) -> ShortlistTokens:
    """Append nodes that find the shortlist of a batch with the table in `folder`; V is `vocabulary`."""
    from onnx import numpy_helper

    b.initializers += [_external_tensor(folder, TABLE_TENSOR), _external_tensor(folder, ALWAYS_TENSOR)]
    zero = b.op("Slice", ALWAYS_TENSOR, b.const([0]), b.const([1]))
    candidates = b.cast(b.op("Gather", TABLE_TENSOR, "input_ids", axis=0), np.int64)  # [B, L, n]
    padded = b.op("Unsqueeze", b.op("Equal", "attention_mask", b.const(0)), b.const([2]))
    batch = b.row_count("input_ids")
    candidate_length = b.op(
        "Unsqueeze", b.op("Mul", b.dimension("input_ids", 1), b.dimension(TABLE_TENSOR, 1)), b.const([0])
    )
    flat = b.op("Concat", batch, candidate_length, axis=0)
    candidates = b.op("Reshape", b.op("Where", padded, zero, candidates), flat)  # [B, L * n]
    frequent_tokens = b.op("Expand", ALWAYS_TENSOR, b.op("Concat", batch, b.row_count(ALWAYS_TENSOR), axis=0))
    text_tokens = b.op("Concat", candidates, frequent_tokens, axis=1)
    # a forced token need not be on any list
    forced_tokens = b.op("Where", b.op("Less", "forced_tokens", b.const(0)), zero, "forced_tokens")
    requested_tokens = b.op("Concat", b.op("Reshape", text_tokens, b.const([-1])), forced_tokens, axis=0)

    def filled(shape: str, value: Any) -> str:
        return b.op("ConstantOfShape", shape, value=numpy_helper.from_array(np.array([value])))

    vocabulary_shape = b.const([vocabulary])
    true_values = b.op("Expand", b.const(True, np.bool_), b.op("Shape", requested_tokens))
    is_candidate = b.op(
        "ScatterElements", filled(vocabulary_shape, False), requested_tokens, true_values, axis=0
    )
    token_ids = b.op("Squeeze", b.op("NonZero", is_candidate), b.const([0]))
    count = b.op("Range", b.const(0), b.dimension(token_ids, 0), b.const(1))
    index_of_token = b.op("ScatterElements", filled(vocabulary_shape, np.int64(0)), token_ids, count, axis=0)
    none = filled(b.op("Concat", batch, b.row_count(token_ids), axis=0), np.float32(-np.inf))
    open_ = b.op("Expand", b.const(0, np.float32), b.op("Shape", text_tokens))
    hidden = b.op("ScatterElements", none, b.op("Gather", index_of_token, text_tokens, axis=0), open_, axis=1)
    return ShortlistTokens(token_ids, hidden)


def _external_tensor(folder: Path, name: str) -> Any:
    """Return a tensor of the shortlist's own file as external data."""
    from onnx import TensorProto, helper
    from onnx.external_data_helper import set_external_data

    from smelt.models.weight_files import read_header

    path = folder / SHORTLIST_FILE
    entry = read_header(path)[name]
    kind = {"U16": TensorProto.UINT16, "I32": TensorProto.INT32, "I64": TensorProto.INT64}[entry["dtype"]]
    begin, end = entry["data_offsets"]
    with path.open("rb") as stream:
        first = 8 + int.from_bytes(stream.read(8), "little")
        if end - begin < 1024:  # onnx reads small tensors where it infers shapes
            stream.seek(first + begin)
            return helper.make_tensor(name, kind, entry["shape"], stream.read(end - begin), raw=True)
    tensor = TensorProto(name=name, data_type=kind, dims=entry["shape"], raw_data=b"0")
    set_external_data(tensor, SHORTLIST_FILE, offset=first + begin, length=end - begin)
    tensor.ClearField("raw_data")
    return tensor


class ShortlistHead:
    """The output layer of a decoder's graph, for the shortlist of the batch only.

    rest: the onnx.GraphProto without it. states: the name of the layer's input, float32 [R, K].
    """

    def __init__(self, graph: Any) -> None:
        """Find the output layer in an onnx.GraphProto of one step.

        Raises:
            RunError: an unsupported operator computes its logits.
        """
        self._constants = GraphConstants(graph)
        producers: dict[str, Any] = {name: node for node in graph.node for name in node.output}
        last = producers.get("logits")
        node: Any = last
        self._shift = ""
        if node is not None and node.op_type == "Add":  # a bias after the matrix multiplication
            node, self._shift = producers.get(node.input[0]), node.input[1]
        if node is None or node.op_type not in _VOCABULARY_AXES:
            kind = "nothing" if node is None else node.op_type
            raise RunError(
                f"{graph.name}: a shortlist cannot restrict the output layer: {kind} computes its logits;"
                f" supported: {', '.join(_VOCABULARY_AXES)}. Set generation_graph: false.",
                code="unsupported-graph",
            )
        self._product: Any = node
        self.states: str = node.input[0]
        self.rest = _remove_nodes(graph, {id(node), id(last)})

    def gather_weights(self, root: GraphLevel, words: str) -> None:
        """Append to the outermost graph nodes that gather the layer's matrix rows of `words`."""
        node, axes = self._product, dict(_VOCABULARY_AXES[self._product.op_type])
        if node.op_type == "Gemm" and not _attributes(node).get("transB"):
            axes[1] = 1
        self._inputs = {
            input_index: self._gather_constant(root, name, words, axes.get(input_index))
            for input_index, name in enumerate(node.input)
            if name and input_index and name in self._constants
        }
        if node.op_type == "MatMulNBits":
            self._inputs[1] = self._dequantize(root.builder)
        self._bias = self._gather_constant(root, self._shift, words, 0) if self._shift else ""

    def shortlist_logits(self, b: GraphBuilder, states: str) -> str:
        """Append to a step's graph the logits float32 [R, C] of float32 `states` [R, K]."""
        node = self._product
        if node.op_type == "MatMulNBits":
            bias = [self._inputs[5]] if 5 in self._inputs else []
            logits = b.op(
                "Gemm", _rounded_activations(b, states, _attributes(node)), self._inputs[1], *bias, transB=1
            )
        else:
            inputs = [
                states,
                *(
                    self._inputs.get(input_index, node.input[input_index])
                    for input_index in range(1, len(node.input))
                ),
            ]
            logits = b.op(node.op_type, *inputs, domain=node.domain, **_attributes(node))
        return b.op("Add", logits, self._bias) if self._bias else logits

    def _gather_constant(self, root: GraphLevel, name: str, words: str, axis: int | None) -> str:
        """Return a constant; if it has a vocabulary axis, only the entries of `words`."""
        b = root.builder
        if axis != 1:
            constant = self._constants.copy_to(name, root, _PREFIX)
            return (
                constant
                if axis is None or self._constants.is_scalar(name)
                else b.op("Gather", constant, words, axis=0)
            )
        # gathering whole rows is many times as fast as gathering scattered elements
        transposed = self._constants.transpose_of(name)
        if transposed is not None:
            rows = self._constants.copy_to(transposed, root, _PREFIX)
        else:
            rows = b.op("Transpose", self._constants.copy_to(name, root, _PREFIX), perm=[1, 0])
        return b.op("Transpose", b.op("Gather", rows, words, axis=0), perm=[1, 0])

    def _dequantize(self, b: GraphBuilder) -> str:
        """Return the dequantized gathered weights of a MatMulNBits, float32 [C, K]."""
        attributes = _attributes(self._product)
        bits, size = attributes["bits"], attributes["block_size"]
        codes = _unpack_bits(b, self._inputs[1], bits, size)  # [C, G, g]
        if 3 in self._inputs:
            packed = b.op("Unsqueeze", self._inputs[3], b.const([1]))
            zeros = _unpack_bits(b, packed, bits, b.op("Shape", codes, start=1, end=2))  # [C, 1, G]
            zeros = b.op("Transpose", zeros, perm=[0, 2, 1])
        else:
            zeros = b.const(2 ** (bits - 1), np.float32)
        scales = b.op("Unsqueeze", self._inputs[2], b.const([2]))
        values = b.op("Mul", b.op("Sub", codes, zeros), scales)
        rows = b.op("Reshape", values, b.op("Concat", b.row_count(codes), b.const([-1]), axis=0))
        return b.op("Slice", rows, b.const([0]), b.const([attributes["K"]]), b.const([1]))


def _unpack_bits(b: GraphBuilder, packed: str, bits: int, most: int | str) -> str:
    """Unpack uint8 [C, G, n], the first value in the lowest bits, to float32 [C, G, most]."""
    parts = []
    for shift in range(0, 8, bits):
        shifted = b.op("BitShift", packed, b.const(shift, np.uint8), direction="RIGHT") if shift else packed
        parts.append(b.op("BitwiseAnd", shifted, b.const(2**bits - 1, np.uint8)))
    unpacked = b.op("Concat", *(b.op("Unsqueeze", part, b.const([3])) for part in parts), axis=3)
    flat = b.op("Reshape", unpacked, b.const([0, 0, -1]))
    end = b.const([most]) if isinstance(most, int) else most
    return b.cast(b.op("Slice", flat, b.const([0]), end, b.const([2])), np.float32)


def _rounded_activations(b: GraphBuilder, states: str, asked: Mapping[str, Any]) -> str:
    """Return float32 [R, K] rounded as a MatMulNBits with these attributes rounds its input.

    At accuracy level 4 blocks of g are rounded to int8 (`smelt/quantization/groupwise.py`).
    """
    if asked.get("accuracy_level", 0) != 4:
        return states
    width, size = asked["K"], asked["block_size"]
    padding = -width % size
    padded = b.op("Pad", states, b.const([0, 0, 0, padding])) if padding else states
    blocks = b.op("Reshape", padded, b.const([0, -1, size]))
    largest = b.op("ReduceMax", b.op("Abs", blocks), b.const([2]), keepdims=1)
    # a block of zeros is not changed
    scales = b.op("Max", b.op("Mul", largest, b.const(1 / 127, np.float32)), b.const(_TINY, np.float32))
    codes = b.op("Round", b.op("Mul", blocks, b.op("Reciprocal", scales)))
    rounded = b.op("Reshape", b.op("Mul", codes, scales), b.const([0, -1]))
    return b.op("Slice", rounded, b.const([0]), b.const([width]), b.const([1])) if padding else rounded


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _remove_nodes(graph: Any, nodes: set[int]) -> Any:
    """Return a copy of a graph without the nodes whose `id` is in `nodes`."""
    import onnx

    kept_nodes = [node for node in graph.node if id(node) not in nodes]
    copy = onnx.GraphProto(name=graph.name, input=graph.input, initializer=graph.initializer)
    copy.node.extend(kept_nodes)
    return copy


@dataclass(frozen=True)
class StepOutputs:
    """The results of a step. caches [R, H, P + S, d]; extra: for the next step.

    logits: float32 [R, C], in beam search [B, R / B, C]. sentence_state: for the next step, see
    `SentenceState`; its table is not reordered yet.
    """

    logits: str
    caches: list[str]
    extra_state: list[str]
    sentence_state: list[str] = field(default_factory=list)


class StepModel(Protocol):
    """The interface of a model for the search.

    source: an input of the graph with a row for each text. ids: int64 [B, S], the first input. prompt: int64
    [B, P], the start of each text. mask: int64 [B, P], 0 where the prompt is padded; None if it never is.
    caches, extra_state: of each row; shared: of each sentence, constant over all steps. shortlist_ids: int64
    [V], the token of each logit; None if the logits are those of the whole vocabulary in order.
    sentence_state: of each sentence in beam search: the table of `beam_attention`, and caches that hold the
    keys of all beams; empty if there are none.
    """

    source: str
    ids: str
    prompt: str
    mask: str | None
    caches: list[LoopCarried]
    extra_state: list[LoopCarried]
    shared: list[LoopCarried]
    shortlist_ids: str | None
    sentence_state: list[LoopCarried]

    def add_step(
        self, levels: Sequence[GraphLevel], ids: str, caches: Sequence[str], extra: Sequence[str],
        shared: tuple[int, Sequence[str]], beams: SentenceState | None,
    ) -> StepOutputs:  # fmt: skip
        """Add one step to the last level.

        Args:
            levels: outermost first.
            ids: int64 [R, S].
            caches: names of this step's.
            extra: as caches.
            shared: the level of the shared values, and their names.
            beams: the state of sentences, if consecutive rows belong to one sentence.
        """


class EncoderDecoderModel:
    """A `StepModel` of an encoder-decoder model."""

    mask: str | None = None
    shortlist_ids: str | None = None
    extra_state: list[LoopCarried] = []  # noqa: RUF012
    sentence_state: list[LoopCarried] = []  # noqa: RUF012
    _head: ShortlistHead | None = None
    _lengths: Sequence[str] = ()
    _prefix: str = "decoder."

    def __init__(self, root: GraphBuilder, encoder: Any, decoder: Any, start: str, has_prompt: bool) -> None:
        """Add the encoder to `root`; `start` is int64: a scalar, or with `has_prompt` [P] tokens."""
        self._decoder = decoder
        source_names = [value.name for value in encoder.input]
        level = GraphLevel(root, {name: name for name in source_names})
        hoist_nodes(encoder, [level], "encoder.")
        inputs = {i.name: i for i in decoder.input}
        self_names = [o.name for o in decoder.output if o.name != "logits"]
        cross = [o.name for o in encoder.output if o.name != "last_hidden_state"]
        self._own, self._cross = self_names, [_past(name) for name in cross]
        self.source = source_names[0]
        batch = root.row_count(self.source)
        self.ids = self.prompt = root.op(
            "Expand",
            root.op("Reshape", start, root.const([1, -1 if has_prompt else 1])),
            root.op("Concat", batch, root.const([1]), axis=0),
        )
        self.caches = [_empty_cache(root, batch, inputs[_past(name)]) for name in self_names]
        self.shared = [
            LoopCarried("cross", level.names[name], *_input_type(inputs[_past(name)])) for name in cross
        ]
        mask = "attention_mask"
        if mask not in source_names:  # all states are attended to
            shape = root.op("Shape", level.names["last_hidden_state"], start=0, end=2)
            mask = root.op("Expand", root.const([[1]]), shape)
        self.shared.append(LoopCarried("source_mask", mask, np.int64, (None, None)))

    def add_prompt(self, root: GraphBuilder) -> None:
        """Run the tokens of the prompt but its last one, which becomes the first input of a step."""
        length = root.op("Shape", self.prompt, start=1, end=2)
        count = root.op("Squeeze", root.op("Sub", length, root.const([1])), root.const([0]))
        shared = 0, [value.initial for value in self.shared]

        def body(b: GraphBuilder, number: str, caches: list[str]) -> tuple[str, list[str]]:
            self._prefix = "prompt."  # names differ from those of the search
            ids = b.op("Gather", self.prompt, b.op("Unsqueeze", number, b.const([0])), axis=1)
            outputs = self.add_step([GraphLevel(root), GraphLevel(b)], ids, caches, [], shared, None)
            self._prefix = type(self)._prefix
            return b.const(True, np.bool_), outputs.caches

        caches = root.loop("prompt", count, self.caches, body)
        self.caches = [replace(value, initial=name) for value, name in zip(self.caches, caches, strict=True)]
        self.ids = root.op("Gather", self.prompt, root.const([-1]), axis=1)

    def share_caches(self, root: GraphBuilder) -> None:
        """Keep one cache for all beams of a sentence, if the decoder's attention makes it possible."""
        lengths = cached_lengths(self._decoder, [_past(name) for name in self._own])
        if lengths is None:
            return
        table = first_table(root, root.row_count("input_ids"))
        shape = (None, 1, None, None)
        self.sentence_state = [LoopCarried("own_keys", table, np.float32, shape), *self.caches]
        self.caches, self._lengths = [], lengths

    def use_shortlist(self, root: GraphLevel, folder: Path, vocabulary: int) -> None:
        """Restrict logits to the shortlist in `folder` for the batch.

        Raises:
            RunError: an unsupported operator computes the graph's logits.
        """
        self._head = ShortlistHead(self._decoder)
        shortlist = gather_shortlist(root.builder, folder, vocabulary)
        self._head.gather_weights(root, shortlist.token_ids)
        self._decoder, self.shortlist_ids = self._head.rest, shortlist.token_ids
        self.shared.append(LoopCarried("hidden", shortlist.excluded, np.float32, (None, None)))

    def add_step(
        self, levels: Sequence[GraphLevel], ids: str, caches: Sequence[str], extra: Sequence[str],
        shared: tuple[int, Sequence[str]], beams: SentenceState | None,
    ) -> StepOutputs:  # fmt: skip
        """Add one step; see `StepModel.add_step`."""
        level_index, values = shared
        names = [*self._cross, "encoder_attention_mask"]
        levels[level_index].names |= dict(zip(names, values[: len(names)], strict=True))
        inner, table = levels[-1], ""
        if beams and beams.values:
            table, caches = beams.values[0], beams.values[1:]
            length = inner.builder.op("Unsqueeze", beams.step, inner.builder.const([0]))
            inner.names |= dict.fromkeys(self._lengths, length)
        inner.names |= {"input_ids": ids} | {_past(n): c for n, c in zip(self._own, caches, strict=True)}
        hoist_nodes(self._decoder, levels, self._prefix)
        if beams:
            widths = [_width(value) for value in self.shared[: len(self._cross)]]
            outer = levels[level_index].builder
            queries = BeamQueries(outer, inner.builder, outer.row_count(values[0]))
            queries.share_keys(dict(zip(values, widths, strict=False)))
            if table:
                widths = [_width(value) for value in self.sentence_state[1:]]
                queries.share_caches(dict(zip(caches, widths, strict=True)), table)
            queries.merge_reshapes()
        value_names = names_at(levels)
        logits = (
            self._shortlist_logits(levels, level_index, values[-1], beams)
            if self._head
            else _by_sentence(inner.builder, value_names["logits"], beams)
        )
        new_caches = [value_names[name] for name in self._own]
        if table:
            return StepOutputs(logits, [], [], [table, *new_caches])
        return StepOutputs(logits, new_caches, [])

    def _shortlist_logits(
        self, levels: Sequence[GraphLevel], level_index: int, hidden: str, beams: SentenceState | None
    ) -> str:
        """Return the logits of the batch's shortlist, plus `hidden` [B, C] of a level."""
        assert self._head is not None
        outer, b = levels[level_index].builder, levels[-1].builder
        logits = self._head.shortlist_logits(b, names_at(levels)[self._head.states])
        if beams:
            hidden = outer.op("Unsqueeze", hidden, outer.const([1]))
        return b.op("Add", _by_sentence(b, logits, beams), hidden)


class DecoderOnlyModel:
    """A `StepModel` of a decoder-only model: the first step takes the whole prompt, padded on the left."""

    shared: list[LoopCarried] = []  # noqa: RUF012
    sentence_state: list[LoopCarried] = []  # noqa: RUF012
    shortlist_ids: str | None = None

    def __init__(self, root: GraphBuilder, decoder: Any) -> None:
        self._decoder = decoder
        inputs = {i.name: i for i in decoder.input}
        self._past = [name for name in inputs if name.startswith("past_key_values.")]
        self.ids = self.prompt = self.source = "input_ids"
        self.mask: str | None = "attention_mask"
        batch = root.row_count("input_ids")
        self.caches = [_empty_cache(root, batch, inputs[name]) for name in self._past]
        zero = root.const(0)
        token_counts = root.op("Sub", root.op("CumSum", "attention_mask", root.const(1)), root.const(1))
        positions = root.op("Where", root.op("Equal", "attention_mask", zero), zero, token_counts)
        self.extra_state = [
            LoopCarried("mask", "attention_mask", np.int64, (None, None)),
            LoopCarried("places", positions, np.int64, (None, None)),
        ]

    def add_step(
        self, levels: Sequence[GraphLevel], ids: str, caches: Sequence[str], extra: Sequence[str],
        shared: tuple[int, Sequence[str]], beams: SentenceState | None,
    ) -> StepOutputs:  # fmt: skip
        """Add one step; see `StepModel.add_step`."""
        inner, builder = levels[-1], levels[-1].builder
        mask, positions = extra
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        inner.names |= inputs | dict(zip(self._past, caches, strict=True))
        inner.names["num_logits_to_keep"] = builder.const(1)
        hoist_nodes(self._decoder, levels, "decoder.")
        value_names = names_at(levels)
        shape = builder.op("Concat", builder.row_count(mask), builder.const([1]), axis=0)
        new_mask = builder.op("Expand", builder.const([[1]]), shape)
        last = builder.op("Slice", positions, builder.const([-1]), builder.const([2**31]), builder.const([1]))
        next_state = [
            builder.op("Concat", mask, new_mask, axis=1),
            builder.op("Add", last, builder.const(1)),
        ]
        logits = builder.op("Squeeze", value_names["logits"], builder.const([1]))
        logits = _by_sentence(builder, logits, beams)
        return StepOutputs(
            logits,
            [value_names[f"present.{name.removeprefix('past_key_values.')}"] for name in self._past],
            next_state,
        )


def _by_sentence(b: GraphBuilder, logits: str, beams: SentenceState | None) -> str:
    """Return `StepOutputs.logits` from float32 [R, C]."""
    return b.op("Reshape", logits, beams.logits_shape) if beams else logits


def _width(keys: LoopCarried) -> int:
    """Return H d of keys or values [B, H, L, d]."""
    _, heads, _, width = keys.shape
    assert heads is not None
    assert width is not None
    return heads * width


def _input_type(info: Any) -> tuple[Any, tuple[int | None, ...]]:
    """Return dtype and shape of a graph's input; None for dynamic dimensions."""
    from onnx import helper

    tensor = info.type.tensor_type
    shape = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
    return helper.tensor_dtype_to_np_dtype(tensor.elem_type), shape


def _empty_cache(root: GraphBuilder, batch: str, info: Any) -> LoopCarried:
    """Return the empty cache [B, H, 0, d] of the first step."""
    from onnx import numpy_helper

    dtype, (_, heads, _, width) = _input_type(info)
    shape = root.op("Concat", batch, root.const([heads, 0, width]), axis=0)
    nothing = root.op("ConstantOfShape", shape, value=numpy_helper.from_array(np.zeros(1, dtype)))
    return LoopCarried("cache", nothing, dtype, (None, heads, None, width))


def _past(name: str) -> str:
    return f"past_key_values.{name.removeprefix('present.')}"
