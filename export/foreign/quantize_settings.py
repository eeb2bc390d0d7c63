"""The settings of the stage `quantize-graph`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings
from smelt.runtime.schemes.registry import DEFAULT, OBSERVING, OF_GRAPHS, find

if TYPE_CHECKING:
    GraphScheme = str
else:
    GraphScheme = Literal[OF_GRAPHS]

# Conv would become ConvInteger, which computes in one thread and, of int8 weights, not at all on the CPU.
_DYNAMIC = ("MatMul", "Gemm", "Attention", "LSTM", "EmbedLayerNormalization", "Gather")
# ReLU and Clip become part of a convolution, which is faster and rounds once less. Others lose more than they
# gain: Add and Softmax raise the error of MiniLM from 0.17 to 0.6 of its deviation (docs/own-onnx.md).
_STATIC = ("Conv", "MatMul", "Gemm", "Relu", "Clip")
# A graph without any of these has nothing that the quantizers would change.
PRODUCTS = (*_DYNAMIC, "Conv", "ConvTranspose")


class QuantizeGraphSettings(Settings):
    """Settings of `quantize-graph`.

    scheme: int8-dynamic, ranges of activations found while it runs; int8-static, found before on calibration
    rows, which convolutions need. method: of int8-static: how a range is chosen from what was seen. rows: of
    the calibration data (else validation, train) that are looked at. per_channel: weights have a scale for
    each output. target: of int8-static: ort-cpu, activations as uint8; tensorrt, all of it symmetric int8,
    biases in float. operators: which to quantize; none: of int8-static Conv (with a Relu or Clip after it),
    MatMul and Gemm, of int8-dynamic all that it can but Conv. leave: names of nodes that stay as they are.
    max_difference: largest root mean square difference of an output from the float graph's, in its standard
    deviations; beyond it the step is an error. none: 0.3 for int8-dynamic, 0.5 for int8-static, and outputs
    that choose a class must agree more often than by chance.
    """

    scheme: GraphScheme = DEFAULT
    method: Literal["minmax", "entropy", "percentile"] = "minmax"
    rows: int = Field(default=128, ge=1, le=100_000)
    per_channel: bool = True
    target: Literal["ort-cpu", "tensorrt"] = "ort-cpu"
    operators: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    max_difference: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.observes and self.method != "minmax":
            raise SettingError(
                f"method is how {OBSERVING} chooses ranges; {self.scheme} finds them while it runs",
                code="settings-conflict",
            )
        if self.target in find(self.scheme).refused:
            raise SettingError(
                f"TensorRT has no dynamic ranges; set scheme: {OBSERVING}", code="unsupported-target"
            )
        return self

    @property
    def observes(self) -> bool:
        """Whether ranges are found before, on rows of data."""
        return find(self.scheme).observes

    @property
    def op_types(self) -> list[str]:
        """The operators that are quantized."""
        return list(self.operators or (_STATIC if self.observes else _DYNAMIC))

    @property
    def limit(self) -> float:
        """The largest difference from the float graph, in standard deviations of an output."""
        return find(self.scheme).graph_error if self.max_difference is None else self.max_difference
