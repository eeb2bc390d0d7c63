"""Caches that grow in place: one buffer is both input and output of a call.

A graph that appends to its caches returns new, longer ones, so each step copies them. ONNX Runtime's
GroupQueryAttention on the CPU does not where a cache's input and its output are one buffer with free room:
it writes the new positions, and reads as many as the attention mask has. The graph file is the same, and so
are the results, bit for bit.

Shapes: R = rows, H = heads of a cache, P = tokens of previous calls, C = buffer positions, d = width of a
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

# A full buffer is copied into one that is longer by this share: one copy for many steps, and little of
# it is empty
_MORE, _LEAST = 8, 16


def grow_cache(cache: NDArray[Any], used: int, needed: int) -> NDArray[Any]:
    """Return [R, H, C, d] with the first `used` positions of `cache`, and room for `needed` and some more."""
    rows, heads, _, width = cache.shape
    made = np.zeros((rows, heads, needed + max(_LEAST, needed // _MORE), width), dtype=cache.dtype)
    made[:, :, :used] = cache[:, :, :used]
    return made


def supports_inplace_cache(
    session: Any, past: Sequence[str], present: Sequence[str], empty: Sequence[tuple[int, int, Any]]
) -> bool:
    """Return whether caches can be input and output at once, by appending one token both ways.

    Args:
        session: of a graph that takes the tokens, mask and positions of a language model.
        past: names of the input caches.
        present: names of the output caches, in the same order.
        empty: heads, width and type of each.
    """
    feeds = {
        "input_ids": np.zeros((1, 1), dtype=np.int64),
        "attention_mask": np.ones((1, 2), dtype=np.int64),
        "position_ids": np.ones((1, 1), dtype=np.int64),
    }
    quiet = onnxruntime.RunOptions()
    quiet.log_severity_level = 4  # a failure is no error here
    short = {
        name: np.zeros((1, heads, 1, width), kind)
        for name, (heads, width, kind) in zip(past, empty, strict=True)
    }
    long = [grow_cache(cache, 1, 2) for cache in short.values()]
    binding = session.io_binding()
    try:
        logits, *caches = session.run(["logits", *present], {**feeds, **short}, quiet)
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        binding.bind_output("logits", "cpu")
        bind_inplace_cache(
            binding, past, present, [onnxruntime.OrtValue.ortvalue_from_numpy(c) for c in long]
        )
        session.run_with_iobinding(binding, quiet)
    except Exception:  # onnxruntime's errors have no common base
        return False
    return np.array_equal(binding.get_outputs()[0].numpy(), logits) and all(
        np.array_equal(one[:, :, :2], other) for one, other in zip(long, caches, strict=True)
    )


def bind_inplace_cache(
    binding: Any, past: Sequence[str], present: Sequence[str], caches: Sequence[Any]
) -> None:
    """Bind each of `caches`, OrtValues [R, H, C, d], as input and as output of a call."""
    for name, left, value in zip(past, present, caches, strict=True):
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(left, value)
