"""The settings of `quantize-onnx`."""

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
# gain: Add and Softmax raise the error of MiniLM from 0.17 to 0.6 of its standard deviation
# (docs/measurements/own-onnx.md).
_STATIC = ("Conv", "MatMul", "Gemm", "Relu", "Clip")
# A graph without any of these has nothing that the quantizers would change.
PRODUCTS = (*_DYNAMIC, "Conv", "ConvTranspose")


class QuantizeOnnxSettings(Settings):
    """Settings of `quantize-onnx`."""

    scheme: GraphScheme = Field(
        default=DEFAULT,
        description="activation ranges at run time, or calibrated (needed for convolutions)",
    )
    calibration_method: Literal["minmax", "entropy", "percentile"] = Field(
        default="minmax",
        description=f"{OBSERVING}: how activation ranges are found",
    )
    calibration_samples: int = Field(
        default=128,
        ge=1,
        le=100_000,
        description=f"{OBSERVING}: from calibration data, else validation, train",
    )
    per_channel: bool = Field(default=True, description="one weight scale per output channel")
    target: Literal["ort-cpu", "tensorrt"] = Field(
        default="ort-cpu",
        description=f"{OBSERVING}: ort-cpu: uint8 activations; tensorrt: symmetric int8",
    )
    op_types: tuple[str, ...] = Field(
        default=(),
        description="operators to quantize; default by scheme",
    )
    exclude: tuple[str, ...] = Field(default=(), description="names of nodes kept in float")
    max_difference: float | None = Field(
        default=None,
        gt=0,
        description="largest root mean square difference of an output, in its standard deviations; default by"
        " scheme",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.observes and self.calibration_method != "minmax":
            raise SettingError(
                f"calibration_method is for {OBSERVING}; {self.scheme} computes ranges at run time: remove"
                " it",
                code="settings-conflict",
            )
        if self.target in find(self.scheme).refused:
            raise SettingError(
                f"TensorRT has no dynamic ranges; set scheme: {OBSERVING}", code="unsupported-target"
            )
        return self

    @property
    def observes(self) -> bool:
        """Whether activation ranges come from calibration samples."""
        return find(self.scheme).observes

    @property
    def quantized_op_types(self) -> list[str]:
        """The operators to quantize."""
        return list(self.op_types or (_STATIC if self.observes else _DYNAMIC))

    @property
    def limit(self) -> float:
        """The largest difference from the float graph, in standard deviations of an output."""
        return find(self.scheme).graph_error if self.max_difference is None else self.max_difference
