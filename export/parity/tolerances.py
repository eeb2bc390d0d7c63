"""Tolerances of parity checks, and the error if a difference exceeds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import ParityError
from smelt.runtime.embedder import EMBEDDING_OUTPUT
from smelt.runtime.schemes.registry import SCHEMES

FloatArray = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference of an output, relative to the standard deviation of the parent's output.

    Exact comparisons use fp32: the largest difference decides. Two runtimes that sum in different orders
    differ by 1e-6 to 1e-5 over the layers of a model, and by less than 1e-6 in the mean; tanh-GELU in place
    of GELU differs by 9e-5 in the mean. `rounded` is the graph of an fp16 file computed in float32 on its own
    weights: there constants that are not weights were rounded too.

    As deployed (fp16, bf16, or schemes that round activations) single values may differ much, so the mean
    decides. An activation that rounds to another value changes everything after it: equal formulas in two
    runtimes differ up to the noise of quantization itself; the scheme sets the limit (`drift`). Such a
    tolerance accepts a graph without its mask; the exact comparison finds that error.
    """

    max_difference: float | None
    mean_difference: float


INT8_CONVOLUTIONS = "int8-convolutions"
LOGITS_TOLERANCES = {
    "fp32": Tolerance(max_difference=1e-3, mean_difference=5e-5),
    "rounded": Tolerance(max_difference=None, mean_difference=1e-3),
    "rounded-bf16": Tolerance(max_difference=None, mean_difference=8e-3),  # three bits fewer
    "fp16": Tolerance(max_difference=None, mean_difference=0.01),
    # 0.007 to 0.034 was measured on tiny models of eight families, 0.012 on a BERT-base of random weights
    "bf16": Tolerance(max_difference=None, mean_difference=0.1),
    # compared with the same graph with float caches: 0.021 to 0.053 on tiny models of seven families, also
    # with quantized weights; wrong graphs are found by the comparison with numpy (check_int8_caches.py)
    "int8-caches": Tolerance(max_difference=None, mean_difference=0.2),
    **{
        name: Tolerance(max_difference=None, mean_difference=scheme.tolerance)
        for name, scheme in SCHEMES.items()
    },
    # int8 throughout, so one value that rounds differently changes everything after it: 0.006 to 0.034 on
    # tiny models in ONNX Runtime, 0.03 to 0.087 in OpenVINO, where int8 itself was 0.06 to 0.09 off
    INT8_CONVOLUTIONS: Tolerance(max_difference=None, mean_difference=0.2),
}
# of a sentence's vector
VECTOR_TOLERANCES = LOGITS_TOLERANCES | {
    name: Tolerance(max_difference=None, mean_difference=scheme.embedding_tolerance)
    for name, scheme in SCHEMES.items()
}
# descriptions of kinds in messages
_KIND_DESCRIPTIONS = {"rounded": "its fp16 weights in float32", "rounded-bf16": "its bf16 weights in float32"}


def check_output(
    graph: str, output: str, expected: FloatArray, got: FloatArray, kind: str
) -> dict[str, float]:
    """Compare one output; return the measured differences, relative to the spread of `expected`.

    Args:
        graph: name of the graph, for the message.
        output: name of its output.
        expected: the parent's output.
        got: the graph's output, same shape.
        kind: a key of TOLERANCES.

    Raises:
        ParityError: the shape differs, a value differs by more than the tolerance, or is not finite.
    """
    if expected.shape != got.shape:
        raise ParityError(
            f"{graph}: {output} has the shape {got.shape}, but its parent's has {expected.shape}.",
            code="shape-mismatch",
            file=f"{graph}.onnx",
        )
    if not np.isfinite(got).all():
        raise ParityError(
            f"{graph}: {output} contains NaN or infinite values. Set dtype: fp32.",
            code="non-finite-outputs",
            file=f"{graph}.onnx",
        )
    spread = float(np.std(expected, dtype=np.float64)) or 1.0
    off = np.abs(expected.astype(np.float64) - got) / spread
    found = {"largest": float(off.max()), "mean": float(off.mean())}
    tolerance = (VECTOR_TOLERANCES if output == EMBEDDING_OUTPUT else LOGITS_TOLERANCES)[kind]
    for name, limit in (("largest", tolerance.max_difference), ("mean", tolerance.mean_difference)):
        if limit is not None and found[name] > limit:
            raise ParityError(
                f"{graph}: {output} differs from its parent's: {name} difference {found[name]:.3g} standard"
                f" deviations of the output, limit {limit:g} ({_KIND_DESCRIPTIONS.get(kind, kind)}).",
                code="parity-failed",
                file=f"{graph}.onnx",
            )
    return {**found, "agreement": float((expected.argmax(-1) == got.argmax(-1)).mean())}
