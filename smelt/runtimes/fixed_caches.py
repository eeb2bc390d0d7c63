"""Caches of a fixed length, which a graph writes in place (ONNX operator TensorScatter, opset 24).

Such a graph has the input `write_indices`, int64 [R]: the position of the first new token in the caches
[R, H, C, d]. Its attention mask has a column for each of the C positions, 0 for those that are not written
yet. Every call has the same shapes, and the outputs `present.*` are the memory of the inputs
`past_key_values.*`.

Shapes: R = rows, S = input tokens of one call, P = tokens of previous calls, H = heads of a cache, C = cache
length, d = width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from smelt.core.errors import MissingDependencyError, RunError
from smelt.generation.backend import Feeds

WRITE_INDICES = "write_indices"
CACHE_OPSET = 24  # the first one with TensorScatter


def fixed_cache_length(shapes: Mapping[str, Sequence[Any]]) -> int | None:
    """Return C of a graph with these shapes of its inputs, None if its caches grow."""
    return int(shapes["attention_mask"][1]) if WRITE_INDICES in shapes else None


def cache_feeds(feeds: Feeds, length: int | None) -> Feeds:
    """Return the inputs of a graph whose caches have `length` positions; unchanged where they grow.

    Args:
        feeds: input_ids, int64 [R, S]; attention_mask, int64 [R, P + S]; other inputs.
        length: C, or None.

    Raises:
        RunError: `cache-full`, P + S is more than C.
    """
    if length is None:
        return feeds
    mask = feeds["attention_mask"]
    rows, total = mask.shape
    if total > length:
        raise RunError(
            f"A text has {total} tokens, but the caches of this graph have room for {length}. Export it with"
            f" onnx: {{cache_length: {total}}} or more, or generate fewer tokens.",
            code="cache-full",
        )
    padded = np.zeros((rows, length), dtype=np.int64)
    padded[:, :total] = mask
    first = np.full(rows, total - feeds["input_ids"].shape[1], dtype=np.int64)
    return {**feeds, "attention_mask": padded, WRITE_INDICES: first}


def require_cache_operators() -> None:
    """Require an ONNX Runtime with TensorScatter and Attention of opset 24 on the CPU, for the parity check.

    Raises:
        MissingDependencyError: it is older.
    """
    import onnxruntime
    from onnx import TensorProto, helper

    cache = [1, 1, 2, 8]
    nodes = [
        helper.make_node("TensorScatter", ["past", "new", WRITE_INDICES], ["present"], axis=2),
        helper.make_node("Attention", ["new", "present", "present"], ["out"]),
    ]
    shapes = {"past": cache, "new": [1, 1, 1, 8], "present": cache, "out": [1, 1, 1, 8]}
    values = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in shapes.items()}
    values[WRITE_INDICES] = helper.make_tensor_value_info(WRITE_INDICES, TensorProto.INT64, [1])
    inputs = [values[name] for name in ("past", "new", WRITE_INDICES)]
    graph = helper.make_graph(nodes, "cache", inputs, [values["out"], values["present"]])
    opsets = [helper.make_opsetid("", CACHE_OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common base
        raise MissingDependencyError(
            f"onnx: cache_length needs TensorScatter and Attention of opset {CACHE_OPSET}, which ONNX Runtime"
            f" {onnxruntime.__version__} does not have. Update it (pip install -U onnxruntime-gpu), or remove"
            " cache_length.",
            code="missing-operators",
        ) from error
