"""Running one graph of an artifact as a runner would, call by call, with all that a session gives.

Shapes: B = batch, L = source length or prompt, S = tokens fed at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.export.parity.reference import Reference
from smelt.runtime.causal import positions
from smelt.runtime.images.batch import INPUT, ImageBatch

Values = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Call:
    """One call of a graph: its inputs, and which part [B, S] of a layer's output [B, all] it computes.

    real: bool [B, S], where no padding is; None where none can be (images).
    """

    feeds: Values
    part: slice
    real: NDArray[np.bool_] | None


def calls(session: Any, folder: Path, name: str, reference: Reference) -> Iterator[tuple[Call, Values]]:
    """Yield each call of a graph, in float32, with all outputs of the session.

    Args:
        session: over the graph, which may have more outputs than the one in `folder`.
        folder: with all graphs of the model.
        name: of the graph.
        reference: the batch, and the tokens that a decoder is fed.
    """
    from smelt.runtime.backends.onnx_session import open_session

    batch = reference.batch
    if isinstance(batch, ImageBatch):
        call = Call({INPUT: batch.pixel_values}, slice(None), None)
        yield call, _run(session, call.feeds)
        return
    real = batch.attention_mask == 1
    ids = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if name == "encoder_model" or reference.tokens is None:
        types = np.zeros_like(batch.input_ids) if batch.token_type_ids is None else batch.token_type_ids
        call = Call({**ids, "token_type_ids": types}, slice(None), real)
        yield call, _run(session, call.feeds)
        return
    state = _empty_caches(session, len(real))
    if name == "model":
        yield from _causal_calls(session, state, reference)
        return
    encoder: Any = open_session(folder / "encoder_model.onnx")
    state |= _as_past(_run(encoder, ids))
    for at, tokens in enumerate(reference.tokens):
        feeds = {"input_ids": tokens[:, None], "encoder_attention_mask": batch.attention_mask, **state}
        got = _run(session, feeds)
        yield Call(feeds, slice(at, at + 1), np.ones((len(real), 1), dtype=bool)), got
        state |= _as_past(got)


def _causal_calls(session: Any, state: Values, reference: Reference) -> Iterator[tuple[Call, Values]]:
    assert reference.tokens is not None
    batch = reference.batch
    ids = np.concatenate([batch.input_ids, reference.tokens[1:].T], axis=1)
    mask = np.concatenate([batch.attention_mask, np.ones_like(reference.tokens[1:].T)], axis=1)
    prompt, total = batch.input_ids.shape[1] - 1, ids.shape[1]
    stretches = [(0, prompt), *((at, at + 1) for at in range(prompt, total))]
    for begin, end in stretches:
        if end > begin:
            places = positions(mask[:, :end])[:, begin:]
            feeds = {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end], "position_ids": places}
            feeds |= {"num_logits_to_keep": np.array(0, dtype=np.int64), **state}
            got = _run(session, feeds)
            yield Call(feeds, slice(begin, end), mask[:, begin:end] == 1), got
            state = _as_past(got)


def _run(session: Any, feeds: Values) -> Values:
    names = [i.name for i in session.get_inputs()]
    results = session.run(None, {name: np.asarray(feeds[name], order="C") for name in names})
    return dict(zip([o.name for o in session.get_outputs()], results, strict=True))


def _empty_caches(session: Any, rows: int) -> Values:
    caches = [i for i in session.get_inputs() if i.name.startswith("past_key_values.")]
    own = [i for i in caches if ".encoder." not in i.name]
    kinds = {i.name: np.int8 if i.type == "tensor(int8)" else np.float32 for i in own}
    return {i.name: np.zeros((rows, i.shape[1], 0, i.shape[3]), dtype=kinds[i.name]) for i in own}


def _as_past(outputs: Values) -> Values:
    """Return the caches among `outputs` under the names of the next call's inputs."""
    mark = "present."
    return {f"past_key_values.{n[len(mark) :]}": v for n, v in outputs.items() if n.startswith(mark)}
