"""Which sizes an engine is built for: ranges per named dimension, shapes per input.

An engine works for any shape between a profile's min and max and is fastest at its opt. Inputs that
share a dimension (both masks and ids have `length`) get the same numbers, since the shapes are made
from one range per dimension name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smelt.core.errors import RunError, nearest


@dataclass(frozen=True)
class Range:
    """The smallest, the usual and the largest size of one dimension."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max:
            raise RunError(
                f"optimization profile: expected min <= opt <= max, got {self.min}, {self.opt}, {self.max}",
                code="wrong-value",
            )


# Names that exporters give to the same thing; the key is smelt's own word.
DIMENSIONS: dict[str, tuple[str, ...]] = {
    "batch": ("batch", "batch_size"),
    "input": ("length", "encoder_length", "sequence_length", "encoder_sequence_length"),
    "past": ("past_length", "past_sequence_length", "past_decoder_sequence_length"),
    "total": ("total_sequence_length",),
}
# Scalars that decide shapes: their profile says which values they take; 0 asks for all.
VALUES: dict[str, str] = {"num_logits_to_keep": "input"}
Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


def round_up(value: float, multiple: int = 8) -> int:
    """Return the next multiple of 8, the width that tensor cores like."""
    return -(-int(-(-value // 1)) // multiple) * multiple


def input_range(lengths: Sequence[int], percentile: float, limit: int) -> Range:
    """Return the range of token counts: from 1, usually the median, at most `percentile` or `limit`."""
    import numpy as np

    highest = min(limit, round_up(float(np.percentile(lengths, percentile))))
    return Range(1, max(1, min(highest, int(np.percentile(lengths, 50)))), max(1, highest))


def past_range(output_lengths: Sequence[int], max_new_tokens: int, limit: int) -> Range:
    """Return the range of the decoder's cache: empty at the first step, one short of the longest output."""
    import numpy as np

    longest = max(0, min(max_new_tokens, limit) - 1)
    # over a whole sentence the cache is half as long as the sentence, on average
    return Range(0, min(longest, max(1, int(np.percentile(output_lengths, 50)) // 2)), longest)


def causal_ranges(
    prompt: int, max_new_tokens: int, limit: int, longest_prompt: int | None = None, usual_prompt: int = 1
) -> dict[str, Range]:
    """Return the ranges of a decoder-only graph: tokens fed (`input`), tokens before (`past`), their sum.

    One profile serves prompts and single tokens. It is fastest at one token on top of half of the longest
    text, because almost all calls are of that kind. TensorRT wants opts and maxima to add up, so the mask
    may be longer than any text is: what is fed has a cache of at most `past` before it. A profile that is
    fastest at prompts (`usual_prompt` above 1) is so where nothing stands before them.

    Args:
        prompt: the most tokens that are fed at once.
        max_new_tokens: the most tokens that a prompt is continued by.
        limit: positions that the model has.
        longest_prompt: that of any profile, where there are several; each has the cache of the longest text.
        usual_prompt: how many tokens it is fastest at.
    """
    fed, longest = max(1, min(prompt, limit)), max(1, min(longest_prompt or prompt, limit))
    before = max(1, min(limit, longest + max_new_tokens) - 1)
    opt = min(usual_prompt, fed)
    usual = max(1, before // 2) if opt == 1 else 0
    total = Range(1, usual + opt, fed + before)
    return {"input": Range(1, opt, fed), "past": Range(0, usual, before), "total": total}


def shapes_of(model: Any, ranges: Mapping[str, Range], graph: str) -> Shapes:
    """Return min, opt and max shape of every dynamic input of an ONNX model, and the values of `VALUES`.

    Raises:
        RunError: a dynamic dimension has no name, or one that is not in `DIMENSIONS`.
    """
    known = {
        alias: ranges[name] for name, aliases in DIMENSIONS.items() if name in ranges for alias in aliases
    }
    weights = {tensor.name for tensor in model.graph.initializer}
    shapes: Shapes = {}
    for value in model.graph.input:
        if value.name in weights:
            continue
        if (longest := ranges.get(VALUES.get(value.name, ""))) is not None:
            shapes[value.name] = (0,), (1,), (longest.max,)
            continue
        said = value.type.tensor_type.shape.dim
        dimensions = [_size(d, value.name, known, graph) for d in said]
        # also where a profile leaves it one size only: to the graph it is dynamic all the same
        if any(not d.HasField("dim_value") for d in said):
            shapes[value.name] = (
                tuple(d.min for d in dimensions),
                tuple(d.opt for d in dimensions),
                tuple(d.max for d in dimensions),
            )
    return shapes


def _size(dimension: Any, name: str, known: Mapping[str, Range], graph: str) -> Range:
    if dimension.HasField("dim_value"):
        return Range(dimension.dim_value, dimension.dim_value, dimension.dim_value)
    if dimension.dim_param in known:
        return known[dimension.dim_param]
    said = dimension.dim_param or "without a name"
    raise RunError(
        f"{graph}: input '{name}' has a dynamic dimension ({said}) that no length is known for."
        f" Known: {', '.join(known)}.{nearest(said, known)}",
        code="unknown-axis-size",
        file=graph,
    )
