"""Real rows for a graph: those of the recipe's data, as a runner would feed them, with real padding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.artifact import Artifact
from smelt.core.data import CUSTOM, TEXT_TO_TEXT
from smelt.core.errors import InputError, RunError
from smelt.core.rows.arrays import NO_AXES, Axes
from smelt.core.stage import Context
from smelt.runtime.batch import Batch
from smelt.runtime.classifier import MODEL
from smelt.runtime.foreign.runner import GraphRunner
from smelt.runtime.foreign.signature import Value, read_signature, row_axes_in

Feeds = dict[str, NDArray[Any]]
# Of the rows, on which a new graph is tried in a process of its own.
_TRIED = 2
PLACES = ("calibration", "validation", "train")
# where a recipe has no rows that a stage may see
_TEXTS = (
    "It is late.",
    "Where is the next station, and when does it open?",
    "After three days of rain the old bridge was closed, and everybody took the road through the hills.",
)


def rows_of(src: Artifact, ctx: Context, count: int, at_once: int = 4) -> tuple[dict[str, list[Feeds]], bool]:
    """Return by graph (without `.onnx`) what to call it with, and whether it is of the recipe's data.

    Args:
        src: an artifact of one graph, `model.onnx`, or of those of a model that generates.
        ctx: its data are looked at, calibration first.
        count: rows at most.
        at_once: rows of a call; a graph whose batch is fixed gets as many as it takes.
    """
    from smelt.runtime.backends.open_runner import open_runner

    with open_runner(src, ctx.threads, "cpu") as runner:
        if src.manifest.task == CUSTOM:
            assert isinstance(runner, GraphRunner)
            feeds, real = _of_arrays(runner, ctx, count, at_once)
            return {MODEL: feeds}, real
        return _of_texts(runner, ctx, count, at_once)


def other_batch(src: Artifact, feeds: Feeds) -> list[Feeds]:
    """Return the rows of one call in a call of another size, where the graph of `src` takes any.

    A simplifier may have written the size of one batch into the graph.
    """
    signature = read_signature(src.path) if src.manifest.task == CUSTOM else None
    if signature is not None and signature.batch is not None:
        return []
    axes = row_axes_in(src.path)
    rows = rows_in(feeds, axes)
    places = list(range(rows - 1) if rows > 1 else (0, 0))
    return [
        {
            name: np.take(value, places, axis)
            if value.ndim and (axis := axes.get(name, 0)) is not None
            else value
            for name, value in feeds.items()
        }
    ]


def rows_in(feeds: Feeds, axes: Axes = NO_AXES) -> int:
    """Return the number of rows of a call; arrays of rank 0 are the same for all.

    axes: which axis of an input holds the rows, where it is not the first; None where it is none.
    """
    places = {name: axes.get(name, 0) for name in feeds}
    return next((v.shape[a] for n, v in feeds.items() if v.ndim and (a := places[n]) is not None), 1)


def _of_arrays(runner: GraphRunner, ctx: Context, count: int, at_once: int) -> tuple[list[Feeds], bool]:
    signature = runner.signature
    size = signature.batch or at_once
    rows = next((ctx.data[place].arrays for place in PLACES if place in ctx.data), None)
    if rows is None:
        random = np.random.default_rng(0)
        return [{v.name: _made_up(v, size, random) for v in signature.inputs}], False
    if signature.batch is not None:
        rows = rows.filled(size)
    last = (
        min(rows.rows, count) if signature.batch is None else max(size, min(rows.rows, count) // size * size)
    )
    if signature.batch is None and min(size, last) > 1:
        try:
            runner.run(signature.feeds(rows, 0, min(size, last)))
        except RunError:  # its batch is open by name alone; row by row it may run
            size = 1
    return [signature.feeds(rows, at, min(at + size, last)) for at in range(0, last, size)], True


def _made_up(value: Value, rows: int, random: np.random.Generator) -> NDArray[Any]:
    """Return numbers for an input that nobody has rows for; axes of any size get 8."""
    dtype = value.dtype
    sizes = [
        rows if axis == value.axis else size if isinstance(size, int) else 8
        for axis, size in enumerate(value.shape or ())
    ]
    if dtype == "str":
        return np.full(sizes, "a", dtype=object)
    if dtype.startswith("float"):
        return random.normal(size=sizes).astype(dtype)
    return random.integers(0, 2, size=sizes).astype(dtype)


def _of_texts(runner: Any, ctx: Context, count: int, at_once: int) -> tuple[dict[str, list[Feeds]], bool]:
    from smelt.core.data import texts_read
    from smelt.export.foreign.generated_rows import feeds_of
    from smelt.runtime.causal import is_causal
    from smelt.runtime.predict import encode_texts, pack

    split = next((ctx.data[place] for place in PLACES if place in ctx.data), None)
    texts, pairs = (list(_TEXTS), None) if split is None else texts_read(split.examples[:count], ctx.task)
    generates = ctx.task in (*TEXT_TO_TEXT, "language-modeling")
    at_once = 1 if is_causal(runner.config) else at_once  # a prompt is padded on the left, rows here are not
    encoded = encode_texts(texts, runner.text.tokenizer, runner.text.limit, pairs)
    found: dict[str, list[Feeds]] = {}
    pad, places = runner.text.tokenizer.pad_token_id or 0, range(len(texts))
    for at in places[::at_once]:  # in their order, not by length, so that they are padded
        batch = pack(encoded, places[at : at + at_once], pad)
        fed = feeds_of(runner, batch) if generates else {MODEL: [_of_batch(batch)]}
        for name, feeds in fed.items():
            found.setdefault(name, []).extend(feeds)
    return found, split is not None


def _of_batch(batch: Batch) -> Feeds:
    types = batch.token_type_ids
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "token_type_ids": np.zeros_like(batch.input_ids) if types is None else types,
    }


def require_one_graph(src: Artifact, word: str) -> None:
    """Require that `src` is a graph that somebody else exported; those of smelt have their own ways.

    Raises:
        InputError: it is not.
    """
    if not src.manifest.details.get("foreign"):
        raise InputError(
            f"{src.path}: {word} is for ONNX models that a recipe starts from. Graphs that smelt exports are"
            " simplified, quantized and narrowed on the way: quantize before onnx, onnx: {dtype: fp16}.",
            code="needs-onnx-model",
        )


def run_graph(path: Path, feeds: list[Feeds], threads: int | None) -> list[Feeds]:
    """Return the outputs of the graph `path` for each of `feeds`, by name.

    Raises:
        RunError: ONNX Runtime cannot open or run it.
    """
    return list(outputs_of(path, feeds, threads))


def outputs_of(path: Path, feeds: list[Feeds], threads: int | None) -> Iterator[Feeds]:
    """Yield the outputs of the graph `path` for each of `feeds`, by name.

    Raises:
        RunError: ONNX Runtime cannot open or run it.
    """
    from smelt.runtime.backends.onnx_session import open_session

    try:
        session = open_session(path, threads or 1)
        kinds = {item.name: item.type for item in session.get_inputs()}
        names = [output.name for output in session.get_outputs()]
        for one in feeds:
            yield dict(zip(names, session.run(names, fitting(one, kinds)), strict=True))
    except Exception as error:  # its error classes share no other base
        words = " ".join(str(error.__cause__ or error).split())[:400]
        raise RunError(
            f"{path.name}: ONNX Runtime cannot run the new graph: {words}", code="unopened-graph"
        ) from error


def require_runs(path: Path, feeds: list[Feeds]) -> None:
    """Run the graph `path`, which was just made, on some rows in a process of its own.

    Raises:
        RunError: `graph-crashes`: that process crashed, ran into a limit, or ONNX Runtime cannot run it.
    """
    from onnx import TensorProto

    from smelt.export.graph_files import read_graph
    from smelt.runtime.foreign.trial import try_graph

    graph = read_graph(path, values=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    whole = {TensorProto.INT32: "tensor(int32)", TensorProto.INT64: "tensor(int64)"}
    kinds = {
        value.name: whole.get(value.type.tensor_type.elem_type, "")
        for value in graph.input
        if value.name not in weights
    }
    for one in feeds[:_TRIED]:
        try:
            try_graph(path, fitting(one, kinds), path.name)
        except InputError as error:
            told = f"the new graph cannot be run: {error} Leave its operators out (operators, leave, keep)."
            raise RunError(told, code="graph-crashes") from error


def fitting(feeds: Feeds, kinds: dict[str, str]) -> Feeds:
    """Return what of `feeds` a graph takes; whole numbers in the width that it takes."""
    width = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}
    return {
        name: value.astype(width[kinds[name]]) if kinds[name] in width else value
        for name, value in feeds.items()
        if name in kinds
    }


def difference(got: list[Feeds], expected: list[Feeds], exact: bool = True) -> float:
    """Return the largest difference of an output, as a share of its standard deviation.

    Infinite where shapes differ, or a value is not finite that was. exact: so it is where a whole number, a
    truth or a text is another one; else those are left to `changed`.
    """
    worst = 0.0
    for one, other in zip(got, expected, strict=True):
        for name, wanted in other.items():
            if exact or wanted.dtype.kind == "f" or one[name].shape != wanted.shape:
                worst = max(worst, _off(one[name], wanted))
    return worst


def changed(got: list[Feeds], expected: list[Feeds]) -> float:
    """Return the share of whole numbers, truths and texts that are others, where shapes are the same."""
    off, total = changed_of(got, expected)
    return off / total if total else 0.0


def changed_of(got: list[Feeds], expected: list[Feeds]) -> tuple[int, int]:
    """Return how many whole numbers, truths and texts are others, and how many there are, as in `changed`."""
    off = total = 0
    for one, other in zip(got, expected, strict=True):
        for name, wanted in other.items():
            if wanted.dtype.kind != "f" and one[name].shape == wanted.shape:
                off += int(np.count_nonzero(one[name] != wanted))
                total += wanted.size
    return off, total


def note_parity(ctx: Context, feeds: list[Feeds], got: list[Feeds], expected: list[Feeds]) -> None:
    """Write into the details how far rounding took the outputs, and what a person should know as a warning.

    `relative` is None where an output has another shape, or is not finite where it was.
    """
    rows = sum(rows_in(one, row_axes_in(ctx.out)) for one in feeds)
    note_difference(ctx, rows, difference(got, expected, exact=False), changed(got, expected))


def note_difference(ctx: Context, rows: int, off: float, share: float) -> None:
    """Write the results of `difference` and `changed` on that many rows into the details."""
    ctx.details["parity"] = {"rows": rows, "relative": off if np.isfinite(off) else None}
    if not np.isfinite(off):
        ctx.warn(
            "outputs-changed",
            f"On {rows} samples an output has another shape than before, or is not finite where it was.",
        )
    if share:
        ctx.warn(
            "outputs-changed",
            f"On {rows} samples {100 * share:.2g} % of the integer or text outputs have changed.",
        )


def _off(got: NDArray[Any], wanted: NDArray[Any]) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    if wanted.dtype.kind != "f":
        return 0.0 if np.array_equal(got, wanted) else float("inf")
    there = np.isfinite(wanted)
    if not np.array_equal(there, np.isfinite(got)) or not np.array_equal(
        got[~there], wanted[~there], equal_nan=True
    ):
        return float("inf")
    a, b = got[there].astype(np.float64), wanted[there].astype(np.float64)
    spread = float(b.std()) if b.size > 1 else 0.0
    return float(np.abs(a - b).max(initial=0.0)) / (spread or float(np.abs(b).max(initial=0.0)) or 1.0)
