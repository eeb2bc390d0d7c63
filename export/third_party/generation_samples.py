"""Record the inputs of the graphs of a model that generates, step by step on real texts.

Shapes: R = rows, P = cached tokens, H = heads, d = width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.runtime.backends.backend import PAST_PREFIX, PRESENT_PREFIX, past_input_name
from smelt.runtime.batch import Batch
from smelt.runtime.causal import position_ids
from smelt.runtime.classifier import MODEL_GRAPH
from smelt.runtime.generate.encoder_decoder_runner import DECODER_GRAPH, ENCODER_GRAPH

Feeds = dict[str, NDArray[Any]]
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
    held = {past_input_name(name): value for name, value in cross.items() if name.startswith(PRESENT_PREFIX)}
    rows = len(batch.input_ids)
    held |= _empty_caches(runner.folder / f"{DECODER_GRAPH}.onnx", rows, set(held))
    said = (runner.generation_config, runner.config)
    start = next(
        (s["decoder_start_token_id"] for s in said if s.get("decoder_start_token_id") is not None), 0
    )
    tokens = np.full((rows, 1), start, dtype=np.int64)
    for _ in range(_STEPS):
        feeds = {"input_ids": tokens, "encoder_attention_mask": batch.attention_mask} | held
        yield feeds
        found = runner.backend.call(DECODER_GRAPH, feeds)
        tokens = found["logits"].argmax(-1).reshape(rows, 1)
        held |= {
            past_input_name(name): value for name, value in found.items() if name.startswith(PRESENT_PREFIX)
        }


def _decoder_feeds(runner: Any, batch: Batch) -> Iterator[Feeds]:
    most = max(1, runner.text.max_input_length - _STEPS)  # generated tokens need positions too
    tokens, mask = batch.input_ids[:, :most], batch.attention_mask[:, :most]
    rows = len(tokens)
    held = _empty_caches(runner.folder / f"{MODEL_GRAPH}.onnx", rows, set())
    for _ in range(_STEPS):
        places = position_ids(mask)[:, -tokens.shape[1] :]
        feeds = {"input_ids": tokens, "attention_mask": mask, "position_ids": places} | held
        yield feeds
        found = runner.backend.call(MODEL_GRAPH, feeds)
        tokens = found["logits"][:, -1:].argmax(-1).reshape(rows, 1)
        mask = np.concatenate([mask, np.ones_like(tokens)], axis=1)
        held = {
            past_input_name(name): value for name, value in found.items() if name.startswith(PRESENT_PREFIX)
        }


def _empty_caches(path: Path, rows: int, present: set[str]) -> Feeds:
    """Return empty caches [R, H, 0, d] for the inputs of the graph in `path` that are not `present`."""
    from smelt.export.graph_files import read_graph

    found = {}
    for value in read_graph(path, values=False).graph.input:
        if value.name.startswith(PAST_PREFIX) and value.name not in present:
            kind = value.type.tensor_type
            _, heads, _, width = (size.dim_value for size in kind.shape.dim)
            found[value.name] = np.zeros(
                (rows, heads, 0, width), _NUMPY_DTYPES.get(kind.elem_type, np.float32)
            )
    return found
