"""Compute the shapes an engine is built for: ranges per named dimension, shapes per input.

An engine accepts any shape between a profile's min and max and is fastest at its opt. Inputs that share a
dimension (both masks and ids have `length`) get the same sizes, because shapes are made from one range per
dimension name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smelt.core.errors import RunError, did_you_mean


@dataclass(frozen=True)
class SizeRange:
    """The minimum, typical and maximum size of one dimension."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max:
            raise RunError(
                f"optimization profile: min <= opt <= max is required, got {self.min}, {self.opt},"
                f" {self.max}",
                code="wrong-value",
            )


# Names that exporters use for the same dimension; the key is smelt's own name.
DIMENSION_NAMES: dict[str, tuple[str, ...]] = {
    "batch": ("batch", "batch_size"),
    "input": ("length", "encoder_length", "sequence_length", "encoder_sequence_length"),
    "past": ("past_length", "past_sequence_length", "past_decoder_sequence_length"),
    "total": ("total_sequence_length",),
}
# Scalars that decide shapes: their profile lists values; 0 requests all.
VALUE_INPUTS: dict[str, str] = {"num_logits_to_keep": "input"}
ProfileShapes = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


def round_up(value: float, multiple: int = 8) -> int:
    """Return the next multiple of 8, which suits tensor cores."""
    return -(-int(-(-value // 1)) // multiple) * multiple


def input_range(lengths: Sequence[int], percentile: float, limit: int) -> SizeRange:
    """Return the range of token counts: from 1, opt the median, max `percentile` or `limit`."""
    import numpy as np

    highest = min(limit, round_up(float(np.percentile(lengths, percentile))))
    return SizeRange(1, max(1, min(highest, int(np.percentile(lengths, 50)))), max(1, highest))


def past_range(output_lengths: Sequence[int], max_new_tokens: int, limit: int) -> SizeRange:
    """Return the range of the decoder's cache: empty at the first step, max one below the longest output."""
    import numpy as np

    longest = max(0, min(max_new_tokens, limit) - 1)
    # averaged over the steps of a sentence, the cache is half as long as the sentence
    return SizeRange(0, min(longest, max(1, int(np.percentile(output_lengths, 50)) // 2)), longest)


def causal_ranges(
    prompt: int, max_new_tokens: int, limit: int, longest_prompt: int | None = None, usual_prompt: int = 1
) -> dict[str, SizeRange]:
    """Return the ranges of a decoder-only graph: new tokens (`input`), cached tokens (`past`), their sum.

    One profile serves prompts and single tokens. Its opt is one token after half of the longest text, because
    almost all calls are of that kind. TensorRT requires opt and max to add up, so the mask may be longer than
    any text: with an input of maximum length the cache holds at most `past` tokens. In a profile with its opt
    at prompts (`usual_prompt` above 1) the cache is empty at opt.

    Args:
        prompt: largest number of input tokens in one call.
        max_new_tokens: largest number of tokens generated after a prompt.
        limit: positions of the model.
        longest_prompt: of any profile, if there are several; each has the cache of the longest text.
        usual_prompt: number of input tokens at opt.
    """
    fed, longest = max(1, min(prompt, limit)), max(1, min(longest_prompt or prompt, limit))
    before = max(1, min(limit, longest + max_new_tokens) - 1)
    opt = min(usual_prompt, fed)
    usual = max(1, before // 2) if opt == 1 else 0
    total = SizeRange(1, usual + opt, fed + before)
    return {"input": SizeRange(1, opt, fed), "past": SizeRange(0, usual, before), "total": total}


def profile_shapes(model: Any, ranges: Mapping[str, SizeRange], graph: str) -> ProfileShapes:
    """Return min, opt and max shape of every dynamic input of an ONNX model, and the values of `VALUES`.

    Raises:
        RunError: a dynamic dimension has no name, or one that is not in `DIMENSIONS`.
    """
    known = {
        alias: ranges[name]
        for name, aliases in DIMENSION_NAMES.items()
        if name in ranges
        for alias in aliases
    }
    weights = {tensor.name for tensor in model.graph.initializer}
    shapes: ProfileShapes = {}
    for value in model.graph.input:
        if value.name in weights:
            continue
        if (longest := ranges.get(VALUE_INPUTS.get(value.name, ""))) is not None:
            shapes[value.name] = (0,), (1,), (longest.max,)
            continue
        said = value.type.tensor_type.shape.dim
        dimensions = [_dimension_range(d, value.name, known, graph) for d in said]
        # also if a profile has a single size: the dimension is dynamic in the graph
        if any(not d.HasField("dim_value") for d in said):
            shapes[value.name] = (
                tuple(d.min for d in dimensions),
                tuple(d.opt for d in dimensions),
                tuple(d.max for d in dimensions),
            )
    return shapes


def _dimension_range(dimension: Any, name: str, known: Mapping[str, SizeRange], graph: str) -> SizeRange:
    if dimension.HasField("dim_value"):
        return SizeRange(dimension.dim_value, dimension.dim_value, dimension.dim_value)
    if dimension.dim_param in known:
        return known[dimension.dim_param]
    said = dimension.dim_param or "without a name"
    raise RunError(
        f"{graph}: input '{name}' has a dynamic dimension ({said}) without a known length."
        f" Known dimensions: {', '.join(known)}.{did_you_mean(said, known)}",
        code="unknown-axis-size",
        file=graph,
    )
