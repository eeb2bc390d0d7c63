"""What the graphs of a model that generates are fed: by its own backend, on real texts, step by step.

Shapes: R = rows, P = tokens before, H = heads, d = width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.runtime.backends.backend import PAST, PRESENT, past_of
from smelt.runtime.batch import Batch
from smelt.runtime.causal import positions
from smelt.runtime.classifier import MODEL
from smelt.runtime.generate.encoder_decoder import DECODER, ENCODER

Feeds = dict[str, NDArray[Any]]
_STEPS = 4  # tokens that are generated for a batch
_KINDS = {10: np.float16}  # of ONNX; all other caches are float32


def feeds_of(runner: Any, batch: Batch) -> dict[str, list[Feeds]]:
    """Return by graph what it is fed while the first tokens of a batch are chosen greedily.

    batch: padded on the right; of a language model one text without padding.
    """
    if not runner.config.get("is_encoder_decoder"):
        return {MODEL: list(_of_decoder(runner, batch))}
    source = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    return {ENCODER: [source], DECODER: list(_of_two(runner, batch, source))}


def _of_two(runner: Any, batch: Batch, source: Feeds) -> Iterator[Feeds]:
    cross = runner.backend.call(ENCODER, source)
    held = {past_of(name): value for name, value in cross.items() if name.startswith(PRESENT)}
    rows = len(batch.input_ids)
    held |= _empty(runner.folder / f"{DECODER}.onnx", rows, set(held))
    said = (runner.generation_config, runner.config)
    start = next(
        (s["decoder_start_token_id"] for s in said if s.get("decoder_start_token_id") is not None), 0
    )
    tokens = np.full((rows, 1), start, dtype=np.int64)
    for _ in range(_STEPS):
        feeds = {"input_ids": tokens, "encoder_attention_mask": batch.attention_mask} | held
        yield feeds
        found = runner.backend.call(DECODER, feeds)
        tokens = found["logits"].argmax(-1).reshape(rows, 1)
        held |= {past_of(name): value for name, value in found.items() if name.startswith(PRESENT)}


def _of_decoder(runner: Any, batch: Batch) -> Iterator[Feeds]:
    most = max(1, runner.text.limit - _STEPS)  # what is generated has places too
    tokens, mask = batch.input_ids[:, :most], batch.attention_mask[:, :most]
    rows = len(tokens)
    held = _empty(runner.folder / f"{MODEL}.onnx", rows, set())
    for _ in range(_STEPS):
        places = positions(mask)[:, -tokens.shape[1] :]
        feeds = {"input_ids": tokens, "attention_mask": mask, "position_ids": places} | held
        yield feeds
        found = runner.backend.call(MODEL, feeds)
        tokens = found["logits"][:, -1:].argmax(-1).reshape(rows, 1)
        mask = np.concatenate([mask, np.ones_like(tokens)], axis=1)
        held = {past_of(name): value for name, value in found.items() if name.startswith(PRESENT)}


def _empty(path: Path, rows: int, there: set[str]) -> Feeds:
    """Return caches [R, H, 0, d] for the inputs of the graph in `path` that are not `there`."""
    from smelt.export.graph_files import read_graph

    found = {}
    for value in read_graph(path, values=False).graph.input:
        if value.name.startswith(PAST) and value.name not in there:
            kind = value.type.tensor_type
            _, heads, _, width = (size.dim_value for size in kind.shape.dim)
            found[value.name] = np.zeros((rows, heads, 0, width), _KINDS.get(kind.elem_type, np.float32))
    return found
