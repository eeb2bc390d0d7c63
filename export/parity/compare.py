"""How far two results may be apart, and the error that says that they are too far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import ParityError
from smelt.runtime.embedder import VECTOR
from smelt.runtime.schemes.registry import SCHEMES

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Tolerance:
    """How far an output may be off, relative to the standard deviation of the parent's output.

    What can be compared exactly is compared as fp32: the largest difference decides. Two runtimes that sum
    in different orders drift apart by 1e-6 to 1e-5 over the layers of a model, by less than 1e-6 in the
    mean; GELU approximated by tanh in place of GELU is 9e-5 in the mean off. `rounded` is the graph of an
    fp16 file computed in float32 on its own weights: there constants that are no weights were rounded too.

    As deployed (fp16, bf16, or products of a scheme that rounds activations) single values may be far off, so
    there the mean decides. An activation that rounds to another code moves everything after it: equal
    formulas in two runtimes drift apart up to the noise of quantization itself, how far says the scheme
    (`drift`). Such a tolerance passes a graph without its mask; that one is caught by what is compared
    exactly.
    """

    largest: float | None
    mean: float


INT8_CONVOLUTIONS = "int8-convolutions"
TOLERANCES = {
    "fp32": Tolerance(largest=1e-3, mean=5e-5),
    "rounded": Tolerance(largest=None, mean=1e-3),
    "rounded-bf16": Tolerance(largest=None, mean=8e-3),  # three bits fewer
    "fp16": Tolerance(largest=None, mean=0.01),
    # 0.007 to 0.034 was measured on tiny models of eight families, 0.012 on a BERT-base of random weights
    "bf16": Tolerance(largest=None, mean=0.1),
    # against the same graph with float caches: 0.021 to 0.053 was measured on tiny models of seven families,
    # also with coded weights; what a wrong graph does, a comparison with numpy sees (int8_caches.py)
    "int8-caches": Tolerance(largest=None, mean=0.2),
    **{name: Tolerance(largest=None, mean=scheme.drift) for name, scheme in SCHEMES.items()},
    # codes all the way, so that one that rounds otherwise moves all behind it: 0.006 to 0.034 was measured of
    # tiny models in ONNX Runtime, 0.03 to 0.087 in OpenVINO, where int8 itself was 0.06 to 0.09 off
    INT8_CONVOLUTIONS: Tolerance(largest=None, mean=0.2),
}
# of a sentence's vector
VECTOR_TOLERANCES = TOLERANCES | {
    name: Tolerance(largest=None, mean=scheme.vector_drift) for name, scheme in SCHEMES.items()
}
# what kinds are called in messages
_WORDS = {"rounded": "its fp16 weights in float32", "rounded-bf16": "its bf16 weights in float32"}


def check_parity(graph: str, output: str, expected: Array, got: Array, kind: str) -> dict[str, float]:
    """Compare one output; return the measured differences, relative to the spread of `expected`.

    Args:
        graph: name of the graph, for the message.
        output: name of its output.
        expected: what the parent computes.
        got: what the graph computes, same shape.
        kind: a word of TOLERANCES.

    Raises:
        ParityError: a shape or a value differs by more than the tolerance, or is not finite.
    """
    if expected.shape != got.shape:
        raise ParityError(
            f"{graph}: {output} has the shape {got.shape}, its parent gives {expected.shape}.",
            code="shape-mismatch",
            file=f"{graph}.onnx",
        )
    if not np.isfinite(got).all():
        raise ParityError(
            f"{graph}: {output} holds values that are not finite; try dtype: fp32.",
            code="non-finite-outputs",
            file=f"{graph}.onnx",
        )
    spread = float(np.std(expected, dtype=np.float64)) or 1.0
    off = np.abs(expected.astype(np.float64) - got) / spread
    found = {"largest": float(off.max()), "mean": float(off.mean())}
    tolerance = (VECTOR_TOLERANCES if output == VECTOR else TOLERANCES)[kind]
    for name, limit in (("largest", tolerance.largest), ("mean", tolerance.mean)):
        if limit is not None and found[name] > limit:
            raise ParityError(
                f"{graph}: {output} differs from its parent's: {name} difference {found[name]:.3g}"
                f" of the output's standard deviation, allowed {limit:g} ({_WORDS.get(kind, kind)}).",
                code="parity-failed",
                file=f"{graph}.onnx",
            )
    return {**found, "agreement": float((expected.argmax(-1) == got.argmax(-1)).mean())}
