"""Caches that grow in place: one buffer is both what a call reads and what it leaves.

A graph that appends to its caches leaves new, longer ones, so each step copies all that was there. ONNX
Runtime's GroupQueryAttention on the CPU does not where a cache's input and its output are one buffer with
room for more: it writes the new places, and reads as many as the attention mask has. The file of the graph is
the same. It computes the same numbers, bit for bit.

Shapes: R = rows, H = heads that cache, P = tokens fed before, C = places of a buffer, d = width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

# A buffer that is full is copied into one that is longer by this share: once for many steps, and little of
# it is empty
_MORE, _LEAST = 8, 16


def with_room(cache: NDArray[Any], used: int, needed: int) -> NDArray[Any]:
    """Return [R, H, C, d] with the first `used` places of `cache`, and room for `needed` and some more."""
    rows, heads, _, width = cache.shape
    made = np.zeros((rows, heads, needed + max(_LEAST, needed // _MORE), width), dtype=cache.dtype)
    made[:, :, :used] = cache[:, :, :used]
    return made


def grows_in_place(
    session: Any, past: Sequence[str], present: Sequence[str], empty: Sequence[tuple[int, int, Any]]
) -> bool:
    """Try whether caches may be input and output at once: one token on top of another, both ways.

    Args:
        session: of a graph that takes the tokens, mask and places of a language model.
        past: names of the caches that it takes.
        present: names of those that it leaves, in the same order.
        empty: heads, width and kind of each.
    """
    feeds = {
        "input_ids": np.zeros((1, 1), dtype=np.int64),
        "attention_mask": np.ones((1, 2), dtype=np.int64),
        "position_ids": np.ones((1, 1), dtype=np.int64),
    }
    quiet = onnxruntime.RunOptions()
    quiet.log_severity_level = 4  # that it cannot is no error
    short = {
        name: np.zeros((1, heads, 1, width), kind)
        for name, (heads, width, kind) in zip(past, empty, strict=True)
    }
    long = [with_room(cache, 1, 2) for cache in short.values()]
    binding = session.io_binding()
    try:
        logits, *caches = session.run(["logits", *present], {**feeds, **short}, quiet)
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        binding.bind_output("logits", "cpu")
        bind_in_place(binding, past, present, [onnxruntime.OrtValue.ortvalue_from_numpy(c) for c in long])
        session.run_with_iobinding(binding, quiet)
    except Exception:  # onnxruntime's errors have no base of their own
        return False
    return np.array_equal(binding.get_outputs()[0].numpy(), logits) and all(
        np.array_equal(one[:, :, :2], other) for one, other in zip(long, caches, strict=True)
    )


def bind_in_place(binding: Any, past: Sequence[str], present: Sequence[str], caches: Sequence[Any]) -> None:
    """Bind each of `caches`, OrtValues [R, H, C, d], as what a call takes and as what it leaves."""
    for name, left, value in zip(past, present, caches, strict=True):
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(left, value)
