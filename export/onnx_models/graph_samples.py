"""Samples for a third-party graph: collect them, run the graph on them, and compare outputs.

The inputs are those of the recipe's data, as a runner inputs them, with real padding. For a model that
generates, they are recorded step by step on real texts.

Shapes: R = rows, P = cached tokens, H = heads, d = width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, RunError
from smelt.data.npz_arrays import NO_SAMPLE_AXES, SampleAxes
from smelt.data.tasks import task_traits
from smelt.export.graph_files import read_graph
from smelt.generation.backend import PAST_PREFIX, PRESENT_PREFIX, Batch, past_input_name
from smelt.generation.generating_runners import DECODER_GRAPH, ENCODER_GRAPH, is_causal, position_ids
from smelt.runtimes.onnx_import.signature import TensorSpec, read_batch_axes, read_signature
from smelt.runtimes.single_call_runners import MODEL_GRAPH, GraphRunner
from smelt.stage import Context

Feeds = dict[str, NDArray[Any]]
# Samples on which a new graph is tried in a subprocess.
_MAX_TRIAL_CALLS = 2
SPLIT_ORDER = ("calibration", "validation", "train")
# used if a recipe has no data that a stage may use
_EXAMPLE_TEXTS = (
    "It is late.",
    "Where is the next station, and when does it open?",
    "After three days of rain the old bridge was closed, and everybody took the road through the hills.",
)


def collect_samples(
    src: Artifact, ctx: Context, count: int, batch_size: int = 4
) -> tuple[dict[str, list[Feeds]], bool]:
    """Return by graph (without `.onnx`) its inputs call by call, and whether they are from the recipe's data.

    Args:
        src: an artifact of one graph, `model.onnx`, or the graphs of a model that generates.
        ctx: with the data; the calibration split is used first.
        count: maximum number of samples.
        batch_size: samples per call; a graph whose batch is fixed gets that number.
    """
    from smelt.runtimes.registry import open_runner

    with open_runner(src, ctx.threads, "cpu") as runner:
        if task_traits(src.manifest.task).modality == "arrays":
            assert isinstance(runner, GraphRunner)
            feeds, is_real = _array_samples(runner, ctx, count, batch_size)
            return {MODEL_GRAPH: feeds}, is_real
        return _text_samples(runner, ctx, count, batch_size)


def resized_batch(src: Artifact, feeds: Feeds) -> list[Feeds]:
    """Return the samples of one call in a call of another size, if the graph of `src` supports any size.

    A simplifier may have fixed the size of one batch in the graph.
    """
    signature = read_signature(src.path) if task_traits(src.manifest.task).modality == "arrays" else None
    if signature is not None and signature.fixed_batch_size is not None:
        return []
    axes = read_batch_axes(src.path)
    batch_size = batch_size_of(feeds, axes)
    row_indices = list(range(batch_size - 1) if batch_size > 1 else (0, 0))
    return [
        {
            name: np.take(value, row_indices, axis)
            if value.ndim and (axis := axes.get(name, 0)) is not None
            else value
            for name, value in feeds.items()
        }
    ]


def batch_size_of(feeds: Feeds, axes: SampleAxes = NO_SAMPLE_AXES) -> int:
    """Return the number of samples of a call; arrays of rank 0 are shared by all samples.

    axes: the sample axis of an input, if it is not the first; None if it has none.
    """
    batch_axes = {name: axes.get(name, 0) for name in feeds}
    return next((v.shape[a] for n, v in feeds.items() if v.ndim and (a := batch_axes[n]) is not None), 1)


def _array_samples(
    runner: GraphRunner, ctx: Context, count: int, batch_size: int
) -> tuple[list[Feeds], bool]:
    signature = runner.signature
    size = signature.fixed_batch_size or batch_size
    arrays = next((ctx.data[split_name].arrays for split_name in SPLIT_ORDER if split_name in ctx.data), None)
    if arrays is None:
        random = np.random.default_rng(0)
        return [{v.name: _random_input(v, size, random) for v in signature.inputs}], False
    if signature.fixed_batch_size is not None:
        arrays = arrays.padded_to(size)
    size = arrays.max_batch_size or size
    last = (
        min(arrays.num_samples, count)
        if signature.fixed_batch_size is None
        else max(size, min(arrays.num_samples, count) // size * size)
    )
    if signature.fixed_batch_size is None and min(size, last) > 1:
        try:
            runner.run(signature.make_feeds(arrays, 0, min(size, last)))
        except RunError:  # its batch is dynamic in name only; sample by sample it may run
            size = 1
    return [
        signature.make_feeds(arrays, start, min(start + size, last)) for start in range(0, last, size)
    ], True


def _random_input(value: TensorSpec, rows: int, random: np.random.Generator) -> NDArray[Any]:
    """Return random numbers for an input without data; axes without a fixed size get 8."""
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


def _text_samples(
    runner: Any, ctx: Context, count: int, batch_size: int
) -> tuple[dict[str, list[Feeds]], bool]:
    from smelt.data.splits import input_texts
    from smelt.models.tokenizer import encode_texts
    from smelt.runtimes.predict_texts import pad_batch

    split = next((ctx.data[split_name] for split_name in SPLIT_ORDER if split_name in ctx.data), None)
    texts, pairs = (
        (list(_EXAMPLE_TEXTS), None) if split is None else input_texts(split.examples[:count], ctx.task)
    )
    generates = ctx.traits.generates
    if is_causal(runner.config):
        batch_size = 1  # a prompt is padded on the left, these rows are not
    encoded = encode_texts(texts, runner.text.tokenizer, runner.text.max_input_length, pairs)
    feeds_by_graph: dict[str, list[Feeds]] = {}
    pad, text_indices = runner.text.tokenizer.pad_token_id or 0, range(len(texts))
    for start in text_indices[::batch_size]:  # in their order, not by length, so that they are padded
        batch = pad_batch(encoded, text_indices[start : start + batch_size], pad)
        recorded = (
            record_generation_feeds(runner, batch) if generates else {MODEL_GRAPH: [_feeds_from_batch(batch)]}
        )
        for name, feeds in recorded.items():
            feeds_by_graph.setdefault(name, []).extend(feeds)
    return feeds_by_graph, split is not None


def _feeds_from_batch(batch: Batch) -> Feeds:
    types = batch.token_type_ids
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "token_type_ids": np.zeros_like(batch.input_ids) if types is None else types,
    }


def require_imported(src: Artifact, stage: str) -> None:
    """Require that `src` is a third-party graph; smelt's own exports have other stages.

    Raises:
        InputError: it is not.
    """
    if not src.manifest.details.get("foreign"):
        raise InputError(
            f"{src.path}: {stage} is only for recipes that start from a third-party ONNX model. Exports of"
            " smelt are already simplified; to quantize, put quantize before onnx; for fp16, set onnx:"
            " {dtype: fp16}.",
            code="needs-onnx-model",
        )


def run_onnx_graph(path: Path, feeds: list[Feeds], threads: int | None) -> list[Feeds]:
    """Return the outputs of the graph `path` for each of `feeds`, by name.

    Raises:
        RunError: ONNX Runtime cannot open or run it.
    """
    return list(iter_graph_outputs(path, feeds, threads))


def iter_graph_outputs(path: Path, feeds: list[Feeds], threads: int | None) -> Iterator[Feeds]:
    """Yield the outputs of the graph `path` for each of `feeds`, by name.

    Raises:
        RunError: ONNX Runtime cannot open or run it.
    """
    from smelt.runtimes.onnx_session import open_onnx_session

    try:
        session = open_onnx_session(path, threads or 1)
        input_types = {item.name: item.type for item in session.get_inputs()}
        names = [output.name for output in session.get_outputs()]
        for inputs in feeds:
            yield dict(zip(names, session.run(names, cast_feeds(inputs, input_types)), strict=True))
    except Exception as error:  # its error classes share no other base class
        error_text = " ".join(str(error.__cause__ or error).split())[:400]
        raise RunError(
            f"{path.name}: ONNX Runtime cannot run the converted graph: {error_text}", code="unopened-graph"
        ) from error


def require_runnable(path: Path, feeds: list[Feeds]) -> None:
    """Run the new graph `path` on some samples in a subprocess.

    Raises:
        RunError: `graph-crashes`: the process crashed, exceeded a limit, or ONNX Runtime cannot run it.
    """
    from onnx import TensorProto

    from smelt.runtimes.onnx_import.trial_run import trial_run

    graph = read_graph(path, values=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    integer_types = {TensorProto.INT32: "tensor(int32)", TensorProto.INT64: "tensor(int64)"}
    input_types = {
        value.name: integer_types.get(value.type.tensor_type.elem_type, "")
        for value in graph.input
        if value.name not in weights
    }
    for inputs in feeds[:_MAX_TRIAL_CALLS]:
        try:
            trial_run(path, cast_feeds(inputs, input_types), path.name)
        except InputError as error:
            message = (
                f"the converted graph fails in ONNX Runtime: {error} Exclude operators (op_types, exclude,"
                " keep_fp32)."
            )
            raise RunError(message, code="graph-crashes") from error


def cast_feeds(feeds: Feeds, types: dict[str, str]) -> Feeds:
    """Return the `feeds` that are inputs of a graph, with integers cast to its types."""
    width = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}
    return {
        name: value.astype(width[types[name]]) if types[name] in width else value
        for name, value in feeds.items()
        if name in types
    }


def max_output_difference(got: list[Feeds], expected: list[Feeds], exact: bool = True) -> float:
    """Return the largest difference of an output, as a fraction of its standard deviation.

    Infinite if shapes differ, or if a value is not finite that was. exact: also if an integer, bool or string
    differs; else those are left to `count_changed`.
    """
    worst = 0.0
    for outputs, other in zip(got, expected, strict=True):
        for name, expected_value in other.items():
            if exact or expected_value.dtype.kind == "f" or outputs[name].shape != expected_value.shape:
                worst = max(worst, _relative_difference(outputs[name], expected_value))
    return worst


def count_changed(got: list[Feeds], expected: list[Feeds]) -> tuple[int, int]:
    """Return the number of integers, bools and strings that differ, and their total."""
    off = total = 0
    for outputs, other in zip(got, expected, strict=True):
        for name, expected_value in other.items():
            if expected_value.dtype.kind != "f" and outputs[name].shape == expected_value.shape:
                off += int(np.count_nonzero(outputs[name] != expected_value))
                total += expected_value.size
    return off, total


def record_difference(ctx: Context, rows: int, difference: float, share: float) -> None:
    """Write the difference and the changed share of the outputs on `rows` samples into the details."""
    ctx.details["parity"] = {"rows": rows, "relative": difference if np.isfinite(difference) else None}
    if not np.isfinite(difference):
        ctx.warn(
            "outputs-changed",
            f"On {rows} samples the shape of an output has changed, or an output is no longer finite.",
        )
    if share:
        ctx.warn(
            "outputs-changed",
            f"{100 * share:.2g} % of the integer or text outputs have changed, on {rows} samples.",
        )


def _relative_difference(got: NDArray[Any], wanted: NDArray[Any]) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    if wanted.dtype.kind != "f":
        return 0.0 if np.array_equal(got, wanted) else float("inf")
    finite = np.isfinite(wanted)
    if not np.array_equal(finite, np.isfinite(got)) or not np.array_equal(
        got[~finite], wanted[~finite], equal_nan=True
    ):
        return float("inf")
    a, b = got[finite].astype(np.float64), wanted[finite].astype(np.float64)
    std = float(b.std()) if b.size > 1 else 0.0
    return float(np.abs(a - b).max(initial=0.0)) / (std or float(np.abs(b).max(initial=0.0)) or 1.0)


_STEPS = 4  # tokens generated for a batch
_NUMPY_DTYPES = {10: np.float16}  # of ONNX; all other caches are float32


def record_generation_feeds(runner: Any, batch: Batch) -> dict[str, list[Feeds]]:
    """Return by graph its inputs while the first tokens of a batch are decoded greedily.

    batch: padded on the right; for a language model one text without padding.
    """
    if not runner.config.get("is_encoder_decoder"):
        return {MODEL_GRAPH: list(_decoder_feeds(runner, batch))}
    source = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    return {ENCODER_GRAPH: [source], DECODER_GRAPH: list(_encoder_decoder_feeds(runner, batch, source))}


def _encoder_decoder_feeds(runner: Any, batch: Batch, source: Feeds) -> Iterator[Feeds]:
    cross = runner.backend.call(ENCODER_GRAPH, source)
    cache_feeds = {
        past_input_name(name): value for name, value in cross.items() if name.startswith(PRESENT_PREFIX)
    }
    batch_size = len(batch.input_ids)
    cache_feeds |= _empty_caches(runner.folder / f"{DECODER_GRAPH}.onnx", batch_size, set(cache_feeds))
    configs = (runner.generation_config, runner.config)
    start = next(
        (s["decoder_start_token_id"] for s in configs if s.get("decoder_start_token_id") is not None), 0
    )
    tokens = np.full((batch_size, 1), start, dtype=np.int64)
    for _ in range(_STEPS):
        feeds = {"input_ids": tokens, "encoder_attention_mask": batch.attention_mask} | cache_feeds
        yield feeds
        outputs = runner.backend.call(DECODER_GRAPH, feeds)
        tokens = outputs["logits"].argmax(-1).reshape(batch_size, 1)
        cache_feeds |= {
            past_input_name(name): value for name, value in outputs.items() if name.startswith(PRESENT_PREFIX)
        }


def _decoder_feeds(runner: Any, batch: Batch) -> Iterator[Feeds]:
    max_length = max(1, runner.text.max_input_length - _STEPS)  # generated tokens need positions too
    tokens, mask = batch.input_ids[:, :max_length], batch.attention_mask[:, :max_length]
    batch_size = len(tokens)
    cache_feeds = _empty_caches(runner.folder / f"{MODEL_GRAPH}.onnx", batch_size, set())
    for _ in range(_STEPS):
        positions = position_ids(mask)[:, -tokens.shape[1] :]
        feeds = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions} | cache_feeds
        yield feeds
        outputs = runner.backend.call(MODEL_GRAPH, feeds)
        tokens = outputs["logits"][:, -1:].argmax(-1).reshape(batch_size, 1)
        mask = np.concatenate([mask, np.ones_like(tokens)], axis=1)
        cache_feeds = {
            past_input_name(name): value for name, value in outputs.items() if name.startswith(PRESENT_PREFIX)
        }


def _empty_caches(path: Path, rows: int, present: set[str]) -> Feeds:
    """Return empty caches [R, H, 0, d] for the inputs of the graph in `path` that are not `present`."""
    caches = {}
    for value in read_graph(path, values=False).graph.input:
        if value.name.startswith(PAST_PREFIX) and value.name not in present:
            kind = value.type.tensor_type
            _, heads, _, width = (size.dim_value for size in kind.shape.dim)
            caches[value.name] = np.zeros(
                (rows, heads, 0, width), _NUMPY_DTYPES.get(kind.elem_type, np.float32)
            )
    return caches
