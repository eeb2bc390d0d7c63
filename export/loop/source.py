"""Models as a search sees them: what is fed first, what a step carries on, what all steps share.

Shapes: B = sentences, R = rows (sentences, times beams), S = tokens fed at once, L = source length,
P = tokens before, H = heads, d = width of a head, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from smelt.export.loop.builder import Builder, Carried
from smelt.export.loop.place import Level, known_at, place
from smelt.export.loop.shortlist import Head, gather_words


@dataclass(frozen=True)
class Stepped:
    """What a step leaves. logits: float32 [R, V]; caches [R, H, P + S, d]; extra: the next step's."""

    logits: str
    caches: list[str]
    extra: list[str]


class Source(Protocol):
    """A model as the search sees it.

    ids: int64 [B, S], what is fed first. prompt: int64 [B, P], what a text begins with. mask: int64 [B, P],
    0 where the prompt is padded; None where it never is. caches, extra: of each row; shared: of each
    sentence, the same in all steps. words: int64 [V], of which word each logit speaks; None where they speak
    of the whole vocabulary in order.
    """

    ids: str
    prompt: str
    mask: str | None
    caches: list[Carried]
    extra: list[Carried]
    shared: list[Carried]
    words: str | None

    def step(
        self, levels: Sequence[Level], ids: str, caches: Sequence[str], extra: Sequence[str],
        shared: tuple[int, Sequence[str]], beams: bool,
    ) -> Stepped:  # fmt: skip
        """Put one step into the last level.

        Args:
            levels: outermost first.
            ids: int64 [R, S].
            caches: names of this step's.
            extra: as caches.
            shared: at which level the shared values are known, and their names.
            beams: several rows of a sentence follow each other.
        """


class Translator:
    """A `Source` of an encoder-decoder model."""

    mask: str | None = None
    words: str | None = None
    extra: list[Carried] = []  # noqa: RUF012
    _head: Head | None = None

    def __init__(self, root: Builder, encoder: Any, decoder: Any, start: str) -> None:
        """Put the encoder into `root`; `start` is int64 scalar, the token that texts begin with."""
        self._decoder = decoder
        level = Level(root, {"input_ids": "input_ids", "attention_mask": "attention_mask"})
        place(encoder, [level], "encoder.")
        inputs = {i.name: i for i in decoder.input}
        own = [o.name for o in decoder.output if o.name != "logits"]
        cross = [o.name for o in encoder.output if o.name != "last_hidden_state"]
        self._own, self._cross = own, [_past(name) for name in cross]
        batch = root.rows("input_ids")
        self.ids = self.prompt = root.op(
            "Expand",
            root.op("Reshape", start, root.const([1, 1])),
            root.op("Concat", batch, root.const([1]), axis=0),
        )
        self.caches = [_empty(root, batch, inputs[_past(name)]) for name in own]
        self.shared = [Carried("cross", level.names[name], *_kind(inputs[_past(name)])) for name in cross]
        self.shared.append(Carried("source_mask", "attention_mask", np.int64, (None, None)))

    def restrict(self, root: Level, folder: Path, vocabulary: int) -> None:
        """Let logits speak only of words that the shortlist in `folder` has for the batch.

        Raises:
            RunError: the graph makes its logits in a way that is not known.
        """
        self._head = Head(self._decoder)
        found = gather_words(root.builder, folder, vocabulary)
        self._head.gather(root, found.words)
        self._decoder, self.words = self._head.rest, found.words
        self.shared.append(Carried("hidden", found.hidden, np.float32, (None, None)))

    def step(
        self, levels: Sequence[Level], ids: str, caches: Sequence[str], extra: Sequence[str],
        shared: tuple[int, Sequence[str]], beams: bool,
    ) -> Stepped:  # fmt: skip
        """See `Source.step`."""
        at, values = shared
        names = [*self._cross, "encoder_attention_mask"]
        levels[at].names |= dict(zip(names, values[: len(names)], strict=True))
        inner = levels[-1]
        inner.names |= {"input_ids": ids} | {_past(n): c for n, c in zip(self._own, caches, strict=True)}
        place(self._decoder, levels, "decoder.")
        if beams:
            widths = [_width(one) for one in self.shared[: len(self._cross)]]
            outer = levels[at].builder
            _share_keys(outer, inner.builder, outer.rows(values[0]), dict(zip(values, widths, strict=False)))
        known = known_at(levels)
        logits = known["logits"] if self._head is None else self._restricted(levels, at, values[-1], beams)
        return Stepped(logits, [known[name] for name in self._own], [])

    def _restricted(self, levels: Sequence[Level], at: int, hidden: str, beams: bool) -> str:
        """Return float32 [R, C]: the logits of the batch's words; `hidden` [B, C], known `at`, is added."""
        assert self._head is not None
        outer, b = levels[at].builder, levels[-1].builder
        logits = self._head.logits(b, known_at(levels)[self._head.states])
        if not beams:
            return b.op("Add", logits, hidden)
        width = outer.op("Shape", hidden, start=1)
        by_sentence = outer.op("Concat", outer.rows(hidden), outer.const([-1]), width, axis=0)
        together = b.op("Reshape", logits, by_sentence)
        alone = b.op("Add", together, outer.op("Unsqueeze", hidden, outer.const([1])))
        return b.op("Reshape", alone, outer.op("Concat", outer.const([-1]), width, axis=0))


class Writer:
    """A `Source` of a decoder-only model: its first step feeds the whole prompt, padded on the left."""

    shared: list[Carried] = []  # noqa: RUF012
    words: str | None = None

    def __init__(self, root: Builder, decoder: Any) -> None:
        self._decoder = decoder
        inputs = {i.name: i for i in decoder.input}
        self._past = [name for name in inputs if name.startswith("past_key_values.")]
        self.ids = self.prompt = "input_ids"
        self.mask: str | None = "attention_mask"
        batch = root.rows("input_ids")
        self.caches = [_empty(root, batch, inputs[name]) for name in self._past]
        zero = root.const(0)
        counted = root.op("Sub", root.op("CumSum", "attention_mask", root.const(1)), root.const(1))
        places = root.op("Where", root.op("Equal", "attention_mask", zero), zero, counted)
        self.extra = [
            Carried("mask", "attention_mask", np.int64, (None, None)),
            Carried("places", places, np.int64, (None, None)),
        ]

    def step(
        self, levels: Sequence[Level], ids: str, caches: Sequence[str], extra: Sequence[str],
        shared: tuple[int, Sequence[str]], beams: bool,
    ) -> Stepped:  # fmt: skip
        """See `Source.step`."""
        inner, inside = levels[-1], levels[-1].builder
        mask, places = extra
        fed = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
        inner.names |= fed | dict(zip(self._past, caches, strict=True))
        inner.names["num_logits_to_keep"] = inside.const(1)
        place(self._decoder, levels, "decoder.")
        known = known_at(levels)
        one = inside.op("Concat", inside.rows(mask), inside.const([1]), axis=0)
        seen = inside.op("Expand", inside.const([[1]]), one)
        last = inside.op("Slice", places, inside.const([-1]), inside.const([2**31]), inside.const([1]))
        after = [
            inside.op("Concat", mask, seen, axis=1),
            inside.op("Add", last, inside.const(1)),
        ]
        logits = inside.op("Squeeze", known["logits"], inside.const([1]))
        return Stepped(logits, [known[_present(name)] for name in self._past], after)


def _share_keys(outer: Builder, inside: Builder, batch: str, keys: Mapping[str, int]) -> None:
    """Let the rows of one sentence be the queries of one attention over its keys, which are not repeated.

    A query [R, 1, H d] becomes [B, R / B, H d]; rows of beams follow each other. `batch`: int64 [1], B, known
    in `outer`. `keys`: H d by name.
    """
    from onnx import helper

    widths = dict.fromkeys(keys.values())
    together = {width: outer.op("Concat", batch, outer.const([-1, width]), axis=0) for width in widths}
    before, nodes = list(inside.nodes), inside.nodes
    nodes.clear()
    apart = {width: inside.const([-1, 1, width]) for width in widths}
    for node in before:
        width = keys.get(node.input[1]) if node.op_type == "MultiHeadAttention" else None
        if width is None:
            nodes.append(node)
            continue
        query, out = node.input[0], node.output[0]
        node.input[0], node.output[0] = inside.name("queries"), inside.name("attended")
        nodes.append(helper.make_node("Reshape", [query, together[width]], [node.input[0]]))
        nodes.extend([node, helper.make_node("Reshape", [node.output[0], apart[width]], [out])])


def _width(keys: Carried) -> int:
    """Return H d of keys or values [B, H, L, d]."""
    _, heads, _, width = keys.shape
    assert heads is not None
    assert width is not None
    return heads * width


def _kind(info: Any) -> tuple[Any, tuple[int | None, ...]]:
    """Return dtype and shape of a graph's input; None for what may differ."""
    from onnx import helper

    tensor = info.type.tensor_type
    shape = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
    return helper.tensor_dtype_to_np_dtype(tensor.elem_type), shape


def _empty(root: Builder, batch: str, info: Any) -> Carried:
    """Return the cache [B, H, 0, d] that a first step gets."""
    from onnx import numpy_helper

    dtype, (_, heads, _, width) = _kind(info)
    shape = root.op("Concat", batch, root.const([heads, 0, width]), axis=0)
    nothing = root.op("ConstantOfShape", shape, value=numpy_helper.from_array(np.zeros(1, dtype)))
    return Carried("cache", nothing, dtype, (None, heads, None, width))


def _past(name: str) -> str:
    return f"past_key_values.{name.removeprefix('present.')}"


def _present(name: str) -> str:
    return f"present.{name.removeprefix('past_key_values.')}"
