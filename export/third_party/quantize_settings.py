"""The settings of `quantize-onnx`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings
from smelt.runtime.schemes.registry import DEFAULT_SCHEME, GRAPH_SCHEMES, STATIC_SCHEME, find_scheme

if TYPE_CHECKING:
    GraphScheme = str
else:
    GraphScheme = Literal[GRAPH_SCHEMES]

# Conv would become ConvInteger, which uses one thread and does not support int8 weights on the CPU.
_DYNAMIC_OPS = ("MatMul", "Gemm", "Attention", "LSTM", "EmbedLayerNormalization", "Gather")
# ReLU and Clip are fused into a convolution, which is faster and rounds once less. Others lose more than they
# gain: Add and Softmax raise the error of MiniLM from 0.17 to 0.6 of its standard deviation
# (docs/measurements/own-onnx.md).
_STATIC_OPS = ("Conv", "MatMul", "Gemm", "Relu", "Clip")
# A graph without any of these has nothing to quantize.
WEIGHTED_OPS = (*_DYNAMIC_OPS, "Conv", "ConvTranspose")


class QuantizeOnnxSettings(Settings):
    """Settings of `quantize-onnx`."""

    scheme: GraphScheme = Field(
        default=DEFAULT_SCHEME,
        description="int8-dynamic: activation ranges at run time; int8-static: calibrated (needed for"
        " convolutions)",
    )
    calibration_method: Literal["minmax", "entropy", "percentile"] = Field(
        default="minmax",
        description=f"{STATIC_SCHEME}: calibration of activation ranges",
    )
    calibration_samples: int = Field(
        default=128,
        ge=1,
        le=100_000,
        description=f"{STATIC_SCHEME}: from calibration, else validation, train",
    )
    per_channel: bool = Field(default=True, description="one weight scale per output channel")
    target: Literal["ort-cpu", "tensorrt"] = Field(
        default="ort-cpu",
        description=f"{STATIC_SCHEME}: ort-cpu: uint8 activations; tensorrt: symmetric int8",
    )
    op_types: tuple[str, ...] = Field(
        default=(),
        description="operators to quantize; default by scheme",
    )
    exclude: tuple[str, ...] = Field(default=(), description="names of nodes kept in float32")
    max_difference: float | None = Field(
        default=None,
        gt=0,
        description="largest root mean square error of an output, in its standard deviations; default by"
        " scheme",
    )

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if not self.uses_calibration and self.calibration_method != "minmax":
            raise SettingError(
                f"calibration_method is for {STATIC_SCHEME}; {self.scheme} computes activation ranges at run"
                " time. Remove calibration_method",
                code="settings-conflict",
            )
        if self.target in find_scheme(self.scheme).unsupported_targets:
            raise SettingError(
                f"TensorRT does not support dynamic quantization. Set scheme: {STATIC_SCHEME}",
                code="unsupported-target",
            )
        return self

    @property
    def uses_calibration(self) -> bool:
        """Whether activation ranges come from calibration samples."""
        return find_scheme(self.scheme).requires_calibration

    @property
    def quantized_op_types(self) -> list[str]:
        """The operators to quantize."""
        return list(self.op_types or (_STATIC_OPS if self.uses_calibration else _DYNAMIC_OPS))

    @property
    def difference_limit(self) -> float:
        """The largest difference from the float graph, in standard deviations of an output."""
        return (
            find_scheme(self.scheme).max_graph_error if self.max_difference is None else self.max_difference
        )
