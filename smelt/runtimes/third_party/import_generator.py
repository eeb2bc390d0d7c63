"""Import third-party generating graphs as those of an artifact, after verification.

The converted graphs are compared with Optimum's once, in a separate process with resource limits. For an
encoder-decoder: keys and values of cross-attention, and the logits of the first token, for rows of two
lengths, against Optimum's first graph. For a language model: that a prompt in one call, in two, token by
token and padded on the left gives the same logits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.runtimes.backend import Feeds
from smelt.runtimes.third_party.convert_optimum import (
    convert_decoder_only,
    convert_encoder_decoder,
    set_cache_shapes,
)
from smelt.runtimes.third_party.import_graph import write_with_external_data
from smelt.runtimes.third_party.isolated_process import IsolatedProcessError, ProcessLimits, run_isolated
from smelt.runtimes.third_party.optimum_layout import (
    DECODER_WITH_PAST_GRAPH,
    ENCODER_GRAPH,
    ENCODER_HIDDEN_STATES,
    FIRST_DECODER_GRAPH,
    MERGED_DECODER_GRAPH,
    MODEL_GRAPH,
    PAST_PREFIX,
    PRESENT_PREFIX,
)
from smelt.runtimes.third_party.trial_run import trial_limits

# in standard deviations of the compared values: float32 differs by order of summation, int8 values change
_TOLERANCE, _TOLERANCE_LOW_PRECISION = 1e-3, 0.1
_IDS = np.array([[3, 4, 5, 2, 4, 1], [4, 3, 2, 1, 0, 0]])  # ids of every vocabulary
_MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
_QUANTIZING_OPS = {"DynamicQuantizeLinear", "QuantizeLinear", "MatMulNBits", "DynamicQuantizeMatMul"}
_NUMPY_DTYPES = {"tensor(float16)": np.float16}


class GeneratorPaths(NamedTuple):
    """smelt's graphs (a language model has no encoder), and Optimum's graphs for comparison."""

    decoder: Path
    encoder: Path | None = None
    first: Path | None = None
    source: Path | None = None


def verify_generator(
    paths: GeneratorPaths, cache_shape: tuple[int, int] | None, origin: str
) -> dict[str, tuple[int, int]]:
    """Compare the graphs; return heads and width of every cache of the decoder, by input name.

    Args:
        paths: of the graphs.
        cache_shape: heads and width from the config, for a graph without its own.
        origin: the model's name in messages.

    Raises:
        InputError: results differ, a graph fails or crashes, or it takes too much memory or time.
    """
    limits = [trial_limits(path, {}) for path in paths if path is not None]
    most = ProcessLimits(max(x.memory_bytes for x in limits) * 2, sum(x.seconds for x in limits))
    words = json.dumps([None if path is None else str(path) for path in paths])
    try:
        answer = run_isolated(__name__, [words, json.dumps(cache_shape)], most)
    except IsolatedProcessError as error:
        raise InputError(
            f"{origin}: a trial run of the graphs failed: {error}.", code="graph-failed"
        ) from error
    if "problem" in answer:
        raise InputError(f"{origin}: {answer['problem']}.", code=answer["code"])
    return {name: (heads, width) for name, (heads, width) in answer["caches"].items()}


def subprocess_main(arguments: Sequence[str]) -> dict[str, Any]:
    """Compare the graphs of `arguments` in this process."""
    decoder, *other_paths = json.loads(arguments[0])
    paths = GeneratorPaths(Path(decoder), *(None if name is None else Path(name) for name in other_paths))
    usual = json.loads(arguments[1])
    try:
        if paths.encoder is None:
            return {"caches": _verify_decoder(paths, usual)}
        return {"caches": _verify_encoder_decoder(paths, usual)}
    except MemoryError:
        raise
    except ValueError as error:
        return {"problem": str(error), "code": "parity-failed"}
    except Exception as error:  # ONNX Runtime's exceptions have no other common base
        return {
            "problem": "ONNX Runtime cannot run its graphs: " + " ".join(str(error).split())[:400],
            "code": "graph-failed",
        }


def _verify_encoder_decoder(paths: GeneratorPaths, cache_shape: Sequence[int] | None) -> dict[str, Any]:
    encoder, decoder, first, source = map(_open, (paths.encoder, paths.decoder, paths.first, paths.source))
    allowed = _tolerance_for(paths)
    read = {"input_ids": _IDS, "attention_mask": _MASK}
    expected = _run(source, read)
    hidden = expected["last_hidden_state"]
    start = np.full((2, 1), 1)
    states = {ENCODER_HIDDEN_STATES: hidden, "encoder_attention_mask": _MASK}
    nothing = dict(
        _empty_caches(first, cache_shape, rows=2)
    )  # a merged graph may be used for the first token too
    present = _run(first, {"input_ids": start} | states | nothing)
    got = _run(encoder, read)
    real = _MASK == 1
    _require_close("the encoder", got["last_hidden_state"][real], hidden[real], allowed)
    cross = {name: value for name, value in got.items() if name.startswith(PRESENT_PREFIX)}
    for name, value in cross.items():
        _require_close(name, np.moveaxis(value, 1, 2)[real], np.moveaxis(present[name], 1, 2)[real], allowed)
    past = {PAST_PREFIX + name.removeprefix(PRESENT_PREFIX): value for name, value in cross.items()}
    own = {
        PAST_PREFIX + name.removeprefix(PRESENT_PREFIX): value[:, :, :0]
        for name, value in present.items()
        if name.startswith(PRESENT_PREFIX) and name not in cross
    }
    inputs = {"input_ids": start, "encoder_attention_mask": _MASK} | past
    try:
        found = _run(decoder, inputs | own)
    except Exception as error:
        raise ValueError(
            "the decoder with caches fails at the first token, with empty caches:"
            f" {' '.join(str(error).split())[:200]}"
        ) from error
    what = "the first token, by the decoder for later ones with empty caches,"
    _require_close(what, found["logits"], present["logits"][:, -1], allowed)
    return {name: (value.shape[1], value.shape[3]) for name, value in {**past, **own}.items()}


def _verify_decoder(paths: GeneratorPaths, cache_shape: Sequence[int] | None) -> dict[str, Any]:
    session, allowed = _open(paths.decoder), _tolerance_for(paths)
    ids, ones = _IDS[:1], np.ones((1, 6), np.int64)
    caches = dict(_empty_caches(session, cache_shape))
    whole, _ = _step(session, ids, ones, caches)
    for what, cuts in (("in two parts", [3]), ("token by token", list(range(1, 6)))):
        held, parts = caches, []
        for begin, end in zip([0, *cuts], [*cuts, 6], strict=True):
            logits, held = _step(session, ids[:, begin:end], ones[:, :end], held)
            parts.append(logits)
        _require_close(f"a prompt {what}", np.concatenate(parts, 1), whole, allowed)
    padded = np.concatenate([np.zeros((1, 2), np.int64), ids[:, :4]], 1)
    both, mask = np.concatenate([ids, padded]), np.array([[1] * 6, [0, 0, 1, 1, 1, 1]])
    two = {name: np.repeat(value, 2, 0) for name, value in caches.items()}
    logits, left = _step(session, both, mask, two)
    _require_close("a prompt padded on the left", logits[1, 2:], whole[0, :4], allowed)
    return {name: (value.shape[1], value.shape[3]) for name, value in left.items()}


def _step(session: Any, ids: Any, mask: Any, caches: Feeds) -> tuple[Any, dict[str, Any]]:
    places = np.where(mask == 0, 0, mask.cumsum(1) - 1)[:, -ids.shape[1] :]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": places} | dict(caches)
    found = _run(session, inputs)
    return found["logits"], {
        PAST_PREFIX + n.removeprefix(PRESENT_PREFIX): v
        for n, v in found.items()
        if n.startswith(PRESENT_PREFIX)
    }


def _empty_caches(
    session: Any, cache_shape: Sequence[int] | None, rows: int = 1
) -> Iterator[tuple[str, NDArray[Any]]]:
    for item in session.get_inputs():
        if item.name.startswith(PAST_PREFIX):
            sizes = (item.shape[1], item.shape[3])
            heads, width = sizes if all(isinstance(size, int) for size in sizes) else cache_shape or (1, 1)
            yield item.name, np.zeros((rows, heads, 0, width), _NUMPY_DTYPES.get(item.type, np.float32))


def _open(path: Path | None) -> Any:
    from smelt.runtimes.onnx_session import open_onnx_session

    assert path is not None
    return open_onnx_session(path, threads=1)


def _run(session: Any, feeds: Feeds) -> dict[str, NDArray[Any]]:
    known = {item.name for item in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    inputs = {name: value for name, value in feeds.items() if name in known}
    return dict(zip(names, session.run(names, inputs), strict=True))


def _require_close(what: str, got: NDArray[Any], expected: NDArray[Any], allowed: float) -> None:
    """Require that two arrays are equal apart from rounding.

    Raises:
        ValueError: they differ.
    """
    if got.shape != expected.shape:
        raise ValueError(f"{what} returns {list(got.shape)}, expected {list(expected.shape)}")
    a, b = got.astype(np.float64), expected.astype(np.float64)
    off = float(np.abs(a - b).max(initial=0.0)) / (float(b.std()) or 1.0)
    if not off <= allowed:
        raise ValueError(
            f"{what} differs from its graphs in sequence (largest difference {off:.2g} of the standard"
            " deviation)"
        )


def _tolerance_for(paths: GeneratorPaths) -> float:
    """Return the tolerance of outputs: larger where graphs round activations or use half precision."""
    from onnx import TensorProto, load

    for path in (path for path in paths if path is not None):
        graph = load(path, load_external_data=False).graph
        kinds = {tensor.data_type for tensor in graph.initializer}
        if TensorProto.FLOAT16 in kinds or _QUANTIZING_OPS & {node.op_type for node in graph.node}:
            return _TOLERANCE_LOW_PRECISION
    return _TOLERANCE


_HEADS_KEYS = ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads")
_WIDTH_KEYS = ("hidden_size", "d_model", "n_embd")


def import_generator(files: Mapping[str, Path], config: Mapping[str, Any], out: Path) -> None:
    """Write the graphs of smelt's runners into the folder `out`.

    Args:
        files: those of a layout in `optimum_layout.py`, by name without `.onnx`, all in one folder.
        config: the model's config.json.
        out: of the artifact.

    Raises:
        InputError: they do not match, or the converted graphs compute different results.
    """
    models = {name: _read_inlined(path) for name, path in files.items()}
    origin = next(iter(files.values())).parent
    if MODEL_GRAPH in models:
        try:
            decoder = convert_decoder_only(models[MODEL_GRAPH])
        except InputError as error:
            raise InputError(f"{files[MODEL_GRAPH]}: {error}.", code=error.code) from error
        path = write_with_external_data(decoder, files[MODEL_GRAPH], out / f"{MODEL_GRAPH}.onnx")
        caches = verify_generator(
            GeneratorPaths(path), _cache_shape_from_config(config), str(files[MODEL_GRAPH])
        )
        _write_cache_shapes(path, caches)
        return
    try:
        encoder, decoder, first = convert_encoder_decoder(models)
    except InputError as error:
        raise InputError(f"{origin}: {error}.", code=error.code) from error
    source = files[MERGED_DECODER_GRAPH] if MERGED_DECODER_GRAPH in files else files[DECODER_WITH_PAST_GRAPH]
    with TemporaryDirectory(dir=out.parent) as space:
        first_decoder = files.get(FIRST_DECODER_GRAPH) or write_with_external_data(
            first, source, Path(space, f"{FIRST_DECODER_GRAPH}.onnx")
        )
        encoder_path = write_with_external_data(encoder, files[ENCODER_GRAPH], out / f"{ENCODER_GRAPH}.onnx")
        path = write_with_external_data(decoder, source, out / f"{DECODER_WITH_PAST_GRAPH}.onnx")
        caches = verify_generator(
            GeneratorPaths(path, encoder_path, first_decoder, files[ENCODER_GRAPH]),
            _cache_shape_from_config(config),
            str(origin),
        )
    _write_cache_shapes(path, caches)


def _read_inlined(path: Path) -> Any:
    """Return the onnx.ModelProto in `path` with functions inlined; external weights stay external."""
    import onnx
    from onnx import inliner

    model = onnx.ModelProto.FromString(path.read_bytes())
    return inliner.inline_local_functions(model) if model.functions else model


def _write_cache_shapes(path: Path, caches: Mapping[str, tuple[int, int]]) -> None:
    """Write heads and width of the caches into the graph in `path`, where it has no numbers."""
    import onnx

    model = onnx.ModelProto.FromString(path.read_bytes())
    set_cache_shapes(model, caches)
    path.write_bytes(model.SerializeToString())


def _cache_shape_from_config(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return heads and head width of the caches from the usual keys of a config."""
    heads = next((config[word] for word in _HEADS_KEYS if isinstance(config.get(word), int)), None)
    all_heads = next((config[word] for word in _HEADS_KEYS[1:] if isinstance(config.get(word), int)), None)
    width = next((config[word] for word in _WIDTH_KEYS if isinstance(config.get(word), int)), None)
    if not heads or not width or not all_heads:
        return None
    head_width = config.get("head_dim")
    return heads, head_width if isinstance(head_width, int) else width // all_heads
