"""Run one graph of an artifact as a runner would, call by call, with all outputs of a session.

Shapes: B = batch, L = source length or prompt, S = new tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.export.parity.torch_reference import TorchReference
from smelt.runtime.causal import position_ids
from smelt.runtime.images.image_batch import PIXEL_VALUES, ImageBatch

TensorsByName = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class GraphCall:
    """One call of a graph: its inputs, and which part [B, S] of a layer's output [B, all] it computes.

    token_mask: bool [B, S], false at padding; None if there is none (images).
    """

    feeds: TensorsByName
    positions: slice
    token_mask: NDArray[np.bool_] | None


def run_graph_calls(
    session: Any, folder: Path, name: str, reference: TorchReference
) -> Iterator[tuple[GraphCall, TensorsByName]]:
    """Yield each call of a graph, in float32, with all outputs of the session.

    Args:
        session: of the graph, which may have more outputs than the one in `folder`.
        folder: with all graphs of the model.
        name: of the graph.
        reference: the batch, and the input tokens of a decoder.
    """
    from smelt.runtime.backends.onnx_session import open_onnx_session

    batch = reference.batch
    if isinstance(batch, ImageBatch):
        call = GraphCall({PIXEL_VALUES: batch.pixel_values}, slice(None), None)
        yield call, _run(session, call.feeds)
        return
    real = batch.attention_mask == 1
    ids = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if name == "encoder_model" or reference.tokens is None:
        types = np.zeros_like(batch.input_ids) if batch.token_type_ids is None else batch.token_type_ids
        call = GraphCall({**ids, "token_type_ids": types}, slice(None), real)
        yield call, _run(session, call.feeds)
        return
    state = _empty_caches(session, len(real))
    if name == "model":
        yield from _causal_calls(session, state, reference)
        return
    encoder: Any = open_onnx_session(folder / "encoder_model.onnx")
    state |= _as_past_inputs(_run(encoder, ids))
    for at, tokens in enumerate(reference.tokens):
        feeds = {"input_ids": tokens[:, None], "encoder_attention_mask": batch.attention_mask, **state}
        got = _run(session, feeds)
        yield GraphCall(feeds, slice(at, at + 1), np.ones((len(real), 1), dtype=bool)), got
        state |= _as_past_inputs(got)


def _causal_calls(
    session: Any, state: TensorsByName, reference: TorchReference
) -> Iterator[tuple[GraphCall, TensorsByName]]:
    assert reference.tokens is not None
    batch = reference.batch
    ids = np.concatenate([batch.input_ids, reference.tokens[1:].T], axis=1)
    mask = np.concatenate([batch.attention_mask, np.ones_like(reference.tokens[1:].T)], axis=1)
    prompt, total = batch.input_ids.shape[1] - 1, ids.shape[1]
    stretches = [(0, prompt), *((at, at + 1) for at in range(prompt, total))]
    for begin, end in stretches:
        if end > begin:
            places = position_ids(mask[:, :end])[:, begin:]
            feeds = {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end], "position_ids": places}
            feeds |= {"num_logits_to_keep": np.array(0, dtype=np.int64), **state}
            got = _run(session, feeds)
            yield GraphCall(feeds, slice(begin, end), mask[:, begin:end] == 1), got
            state = _as_past_inputs(got)


def _run(session: Any, feeds: TensorsByName) -> TensorsByName:
    names = [i.name for i in session.get_inputs()]
    results = session.run(None, {name: np.asarray(feeds[name], order="C") for name in names})
    return dict(zip([o.name for o in session.get_outputs()], results, strict=True))


def _empty_caches(session: Any, rows: int) -> TensorsByName:
    caches = [i for i in session.get_inputs() if i.name.startswith("past_key_values.")]
    own = [i for i in caches if ".encoder." not in i.name]
    kinds = {i.name: np.int8 if i.type == "tensor(int8)" else np.float32 for i in own}
    return {i.name: np.zeros((rows, i.shape[1], 0, i.shape[3]), dtype=kinds[i.name]) for i in own}


def _as_past_inputs(outputs: TensorsByName) -> TensorsByName:
    """Return the caches among `outputs` under the names of the next call's inputs."""
    mark = "present."
    return {f"past_key_values.{n[len(mark) :]}": v for n, v in outputs.items() if n.startswith(mark)}
