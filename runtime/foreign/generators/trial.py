"""Do the graphs that were made compute what Optimum's do? Asked once, in a process of its own, with limits.

Of a translator: keys and values of cross-attention, and the logits of the first token, of rows of two
lengths, which Optimum's first graph gives too. Of a language model: that a prompt in one
call, in two, token by token and padded on the left gives the same logits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError
from smelt.runtime.foreign.generators.layout import PAST, PRESENT, STATES
from smelt.runtime.foreign.limits import FailedError, Limits, ask
from smelt.runtime.foreign.trial import limits_for

# of the standard deviation of what is compared: float32 rounds otherwise in another order, int8 codes move
_ALLOWED, _ALLOWED_NARROW = 1e-3, 0.1
_IDS = np.array([[3, 4, 5, 2, 4, 1], [4, 3, 2, 1, 0, 0]])  # that every vocabulary has
_MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
_ROUNDS = {"DynamicQuantizeLinear", "QuantizeLinear", "MatMulNBits", "DynamicQuantizeMatMul"}
_KINDS = {"tensor(float16)": np.float16}
Feeds = Mapping[str, NDArray[Any]]


class Paths(NamedTuple):
    """What smelt calls (a language model has no encoder), and what of Optimum's it is compared with."""

    decoder: Path
    encoder: Path | None = None
    first: Path | None = None
    source: Path | None = None


def try_generator(paths: Paths, usual: tuple[int, int] | None, origin: str) -> dict[str, tuple[int, int]]:
    """Compare; return heads and width of every cache that the decoder takes, by the input's name.

    Args:
        paths: of the graphs.
        usual: heads and width as the config says, for a graph that does not say its own.
        origin: how the user calls the model.

    Raises:
        InputError: they compute something else, fail, crash, or take more memory or time than they should.
    """
    limits = [limits_for(path, {}) for path in paths if path is not None]
    most = Limits(max(x.memory_bytes for x in limits) * 2, sum(x.seconds for x in limits))
    words = json.dumps([None if path is None else str(path) for path in paths])
    try:
        said = ask(__name__, [words, json.dumps(usual)], most)
    except FailedError as error:
        raise InputError(f"{origin}: trying its graphs failed: {error}.", code="graph-failed") from error
    if "problem" in said:
        raise InputError(f"{origin}: {said['problem']}.", code=said["code"])
    return {name: (heads, width) for name, (heads, width) in said["caches"].items()}


def answer(arguments: Sequence[str]) -> dict[str, Any]:
    """Compare the graphs that `arguments` name, in this process."""
    decoder, *others = json.loads(arguments[0])
    paths = Paths(Path(decoder), *(None if name is None else Path(name) for name in others))
    usual = json.loads(arguments[1])
    try:
        if paths.encoder is None:
            return {"caches": _of_decoder(paths, usual)}
        return {"caches": _of_two(paths, usual)}
    except MemoryError:
        raise
    except ValueError as error:
        return {"problem": str(error), "code": "parity-failed"}
    except Exception as error:  # ONNX Runtime's errors share no other base
        return {
            "problem": "ONNX Runtime cannot run its graphs: " + " ".join(str(error).split())[:400],
            "code": "graph-failed",
        }


def _of_two(paths: Paths, usual: Sequence[int] | None) -> dict[str, Any]:
    encoder, decoder, first, source = map(_open, (paths.encoder, paths.decoder, paths.first, paths.source))
    allowed = _allowed(paths)
    read = {"input_ids": _IDS, "attention_mask": _MASK}
    expected = _run(source, read)
    hidden = expected["last_hidden_state"]
    start = np.full((2, 1), 1)
    states = {STATES: hidden, "encoder_attention_mask": _MASK}
    nothing = dict(_empty(first, usual, rows=2))  # which a merged graph may take for the first token too
    one = _run(first, {"input_ids": start} | states | nothing)
    got = _run(encoder, read)
    real = _MASK == 1
    _require("the encoder", got["last_hidden_state"][real], hidden[real], allowed)
    cross = {name: value for name, value in got.items() if name.startswith(PRESENT)}
    for name, value in cross.items():
        _require(name, np.moveaxis(value, 1, 2)[real], np.moveaxis(one[name], 1, 2)[real], allowed)
    past = {PAST + name.removeprefix(PRESENT): value for name, value in cross.items()}
    own = {
        PAST + name.removeprefix(PRESENT): value[:, :, :0]
        for name, value in one.items()
        if name.startswith(PRESENT) and name not in cross
    }
    fed = {"input_ids": start, "encoder_attention_mask": _MASK} | past
    try:
        found = _run(decoder, fed | own)
    except Exception as error:
        raise ValueError(
            "its decoder for later tokens does not take the first one, with caches of no places:"
            f" {' '.join(str(error).split())[:200]}"
        ) from error
    what = "the first token, by the decoder for later ones with caches of no places,"
    _require(what, found["logits"], one["logits"][:, -1], allowed)
    return {name: (value.shape[1], value.shape[3]) for name, value in {**past, **own}.items()}


def _of_decoder(paths: Paths, usual: Sequence[int] | None) -> dict[str, Any]:
    session, allowed = _open(paths.decoder), _allowed(paths)
    ids, ones = _IDS[:1], np.ones((1, 6), np.int64)
    caches = dict(_empty(session, usual))
    whole, _ = _step(session, ids, ones, caches)
    for what, cuts in (("in two parts", [3]), ("token by token", list(range(1, 6)))):
        held, parts = caches, []
        for begin, end in zip([0, *cuts], [*cuts, 6], strict=True):
            logits, held = _step(session, ids[:, begin:end], ones[:, :end], held)
            parts.append(logits)
        _require(f"a prompt {what}", np.concatenate(parts, 1), whole, allowed)
    padded = np.concatenate([np.zeros((1, 2), np.int64), ids[:, :4]], 1)
    both, mask = np.concatenate([ids, padded]), np.array([[1] * 6, [0, 0, 1, 1, 1, 1]])
    two = {name: np.repeat(value, 2, 0) for name, value in caches.items()}
    logits, left = _step(session, both, mask, two)
    _require("a prompt beside a longer one, padded on its left,", logits[1, 2:], whole[0, :4], allowed)
    return {name: (value.shape[1], value.shape[3]) for name, value in left.items()}


def _step(session: Any, ids: Any, mask: Any, caches: Feeds) -> tuple[Any, dict[str, Any]]:
    places = np.where(mask == 0, 0, mask.cumsum(1) - 1)[:, -ids.shape[1] :]
    fed = {"input_ids": ids, "attention_mask": mask, "position_ids": places} | dict(caches)
    found = _run(session, fed)
    return found["logits"], {
        PAST + n.removeprefix(PRESENT): v for n, v in found.items() if n.startswith(PRESENT)
    }


def _empty(session: Any, usual: Sequence[int] | None, rows: int = 1) -> Iterator[tuple[str, NDArray[Any]]]:
    for item in session.get_inputs():
        if item.name.startswith(PAST):
            said = (item.shape[1], item.shape[3])
            heads, width = said if all(isinstance(size, int) for size in said) else usual or (1, 1)
            yield item.name, np.zeros((rows, heads, 0, width), _KINDS.get(item.type, np.float32))


def _open(path: Path | None) -> Any:
    from smelt.runtime.backends.onnx_session import open_session

    assert path is not None
    return open_session(path, threads=1)


def _run(session: Any, feeds: Feeds) -> dict[str, NDArray[Any]]:
    known = {item.name for item in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    fed = {name: value for name, value in feeds.items() if name in known}
    return dict(zip(names, session.run(names, fed), strict=True))


def _require(what: str, got: NDArray[Any], expected: NDArray[Any], allowed: float) -> None:
    """Require that two arrays are the same but for rounding.

    Raises:
        ValueError: they are not.
    """
    if got.shape != expected.shape:
        raise ValueError(f"{what} gives {list(got.shape)}, expected {list(expected.shape)}")
    a, b = got.astype(np.float64), expected.astype(np.float64)
    off = float(np.abs(a - b).max(initial=0.0)) / (float(b.std()) or 1.0)
    if not off <= allowed:
        raise ValueError(
            f"{what} gives something else than its graphs do one after another (largest difference {off:.2g}"
            " of the standard deviation)"
        )


def _allowed(paths: Paths) -> float:
    """Return how far outputs may be off: more where graphs round activations or compute in half precision."""
    from onnx import TensorProto, load

    for path in (path for path in paths if path is not None):
        graph = load(path, load_external_data=False).graph
        kinds = {tensor.data_type for tensor in graph.initializer}
        if TensorProto.FLOAT16 in kinds or _ROUNDS & {node.op_type for node in graph.node}:
            return _ALLOWED_NARROW
    return _ALLOWED
