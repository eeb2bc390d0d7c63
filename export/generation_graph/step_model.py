"""Models as the search sees them: first inputs, state of a step, values shared by all steps.

Shapes: B = sentences, R = rows (sentences, times beams), S = new tokens, L = source length, P = cached
tokens, H = heads, d = width of a head, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from smelt.export.generation_graph.graph_builder import (
    GraphBuilder,
    GraphLevel,
    LoopCarried,
    hoist_nodes,
    names_at,
)
from smelt.export.generation_graph.shortlist_head import ShortlistHead, gather_shortlist


@dataclass(frozen=True)
class StepOutputs:
    """The results of a step. logits: float32 [R, V]; caches [R, H, P + S, d]; extra: for the next step."""

    logits: str
    caches: list[str]
    extra_state: list[str]


class StepModel(Protocol):
    """The interface of a model for the search.

    ids: int64 [B, S], the first input. prompt: int64 [B, P], the start of each text. mask: int64 [B, P], 0
    where the prompt is padded; None if it never is. caches, extra_state: of each row; shared: of each
    sentence, constant over all steps. shortlist_ids: int64 [V], the token of each logit; None if the logits
    are those of the whole vocabulary in order.
    """

    ids: str
    prompt: str
    mask: str | None
    caches: list[LoopCarried]
    extra_state: list[LoopCarried]
    shared: list[LoopCarried]
    shortlist_ids: str | None

    def add_step(
        self, levels: Sequence[GraphLevel], ids: str, caches: Sequence[str], extra: Sequence[str],
        shared: tuple[int, Sequence[str]], beams: bool,
    ) -> StepOutputs:  # fmt: skip
        """Add one step to the last level.

        Args:
            levels: outermost first.
            ids: int64 [R, S].
            caches: names of this step's.
            extra: as caches.
            shared: the level of the shared values, and their names.
            beams: whether consecutive rows belong to one sentence.
        """


class EncoderDecoderModel:
    """A `StepModel` of an encoder-decoder model."""

    mask: str | None = None
    shortlist_ids: str | None = None
    extra_state: list[LoopCarried] = []  # noqa: RUF012
    _head: ShortlistHead | None = None

    def __init__(self, root: GraphBuilder, encoder: Any, decoder: Any, start: str) -> None:
        """Add the encoder to `root`; `start` is int64 scalar, the start token."""
        self._decoder = decoder
        level = GraphLevel(root, {"input_ids": "input_ids", "attention_mask": "attention_mask"})
        hoist_nodes(encoder, [level], "encoder.")
        inputs = {i.name: i for i in decoder.input}
        own = [o.name for o in decoder.output if o.name != "logits"]
        cross = [o.name for o in encoder.output if o.name != "last_hidden_state"]
        self._own, self._cross = own, [_past(name) for name in cross]
        batch = root.row_count("input_ids")
        self.ids = self.prompt = root.op(
            "Expand",
            root.op("Reshape", start, root.const([1, 1])),
            root.op("Concat", batch, root.const([1]), axis=0),
        )
        self.caches = [_empty_cache(root, batch, inputs[_past(name)]) for name in own]
        self.shared = [
            LoopCarried("cross", level.names[name], *_input_type(inputs[_past(name)])) for name in cross
        ]
        self.shared.append(LoopCarried("source_mask", "attention_mask", np.int64, (None, None)))

    def use_shortlist(self, root: GraphLevel, folder: Path, vocabulary: int) -> None:
        """Restrict logits to the shortlist in `folder` for the batch.

        Raises:
            RunError: an unsupported operator computes the graph's logits.
        """
        self._head = ShortlistHead(self._decoder)
        found = gather_shortlist(root.builder, folder, vocabulary)
        self._head.gather_weights(root, found.token_ids)
        self._decoder, self.shortlist_ids = self._head.rest, found.token_ids
        self.shared.append(LoopCarried("hidden", found.excluded, np.float32, (None, None)))

    def add_step(
        self, levels: Sequence[GraphLevel], ids: str, caches: Sequence[str], extra: Sequence[str],
        shared: tuple[int, Sequence[str]], beams: bool,
    ) -> StepOutputs:  # fmt: skip
        """Add one step; see `StepModel.add_step`."""
        at, values = shared
        names = [*self._cross, "encoder_attention_mask"]
        levels[at].names |= dict(zip(names, values[: len(names)], strict=True))
        inner = levels[-1]
        inner.names |= {"input_ids": ids} | {_past(n): c for n, c in zip(self._own, caches, strict=True)}
        hoist_nodes(self._decoder, levels, "decoder.")
        if beams:
            widths = [_width(value) for value in self.shared[: len(self._cross)]]
            outer = levels[at].builder
            _share_attention_keys(
                outer, inner.builder, outer.row_count(values[0]), dict(zip(values, widths, strict=False))
            )
        known = names_at(levels)
        logits = (
            known["logits"] if self._head is None else self._shortlist_logits(levels, at, values[-1], beams)
        )
        return StepOutputs(logits, [known[name] for name in self._own], [])

    def _shortlist_logits(self, levels: Sequence[GraphLevel], at: int, hidden: str, beams: bool) -> str:
        """Return float32 [R, C]: the logits of the batch's shortlist, plus `hidden` [B, C] of level `at`."""
        assert self._head is not None
        outer, b = levels[at].builder, levels[-1].builder
        logits = self._head.shortlist_logits(b, names_at(levels)[self._head.states])
        if not beams:
            return b.op("Add", logits, hidden)
        width = outer.op("Shape", hidden, start=1)
        by_sentence = outer.op("Concat", outer.row_count(hidden), outer.const([-1]), width, axis=0)
        together = b.op("Reshape", logits, by_sentence)
        alone = b.op("Add", together, outer.op("Unsqueeze", hidden, outer.const([1])))
        return b.op("Reshape", alone, outer.op("Concat", outer.const([-1]), width, axis=0))


class DecoderOnlyModel:
    """A `StepModel` of a decoder-only model: the first step takes the whole prompt, padded on the left."""

    shared: list[LoopCarried] = []  # noqa: RUF012
    shortlist_ids: str | None = None

    def __init__(self, root: GraphBuilder, decoder: Any) -> None:
        self._decoder = decoder
        inputs = {i.name: i for i in decoder.input}
        self._past = [name for name in inputs if name.startswith("past_key_values.")]
        self.ids = self.prompt = "input_ids"
        self.mask: str | None = "attention_mask"
        batch = root.row_count("input_ids")
        self.caches = [_empty_cache(root, batch, inputs[name]) for name in self._past]
        zero = root.const(0)
        counted = root.op("Sub", root.op("CumSum", "attention_mask", root.const(1)), root.const(1))
        places = root.op("Where", root.op("Equal", "attention_mask", zero), zero, counted)
        self.extra_state = [
            LoopCarried("mask", "attention_mask", np.int64, (None, None)),
            LoopCarried("places", places, np.int64, (None, None)),
        ]

    def add_step(
        self, levels: Sequence[GraphLevel], ids: str, caches: Sequence[str], extra: Sequence[str],
        shared: tuple[int, Sequence[str]], beams: bool,
    ) -> StepOutputs:  # fmt: skip
        """Add one step; see `StepModel.add_step`."""
        inner, inside = levels[-1], levels[-1].builder
        mask, places = extra
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
        inner.names |= inputs | dict(zip(self._past, caches, strict=True))
        inner.names["num_logits_to_keep"] = inside.const(1)
        hoist_nodes(self._decoder, levels, "decoder.")
        known = names_at(levels)
        shape = inside.op("Concat", inside.row_count(mask), inside.const([1]), axis=0)
        seen = inside.op("Expand", inside.const([[1]]), shape)
        last = inside.op("Slice", places, inside.const([-1]), inside.const([2**31]), inside.const([1]))
        after = [
            inside.op("Concat", mask, seen, axis=1),
            inside.op("Add", last, inside.const(1)),
        ]
        logits = inside.op("Squeeze", known["logits"], inside.const([1]))
        return StepOutputs(logits, [known[_present(name)] for name in self._past], after)


def _share_attention_keys(
    outer: GraphBuilder, inside: GraphBuilder, batch: str, keys: Mapping[str, int]
) -> None:
    """Make the rows of one sentence queries of one attention over its keys, which are not repeated.

    A query [R, 1, H d] becomes [B, R / B, H d]; rows of beams are consecutive. `batch`: int64 [1], B, a value
    of `outer`. `keys`: H d by name.
    """
    from onnx import helper

    widths = dict.fromkeys(keys.values())
    together = {width: outer.op("Concat", batch, outer.const([-1, width]), axis=0) for width in widths}
    before, nodes = list(inside.nodes), inside.nodes
    nodes.clear()
    shapes = {width: inside.const([-1, 1, width]) for width in widths}
    for node in before:
        width = keys.get(node.input[1]) if node.op_type == "MultiHeadAttention" else None
        if width is None:
            nodes.append(node)
            continue
        query, out = node.input[0], node.output[0]
        node.input[0], node.output[0] = inside.new_name("queries"), inside.new_name("attended")
        nodes.append(helper.make_node("Reshape", [query, together[width]], [node.input[0]]))
        nodes.extend([node, helper.make_node("Reshape", [node.output[0], shapes[width]], [out])])


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


def _present(name: str) -> str:
    return f"present.{name.removeprefix('past_key_values.')}"
