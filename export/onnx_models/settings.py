"""The settings of `quantize-onnx`, and the operators that each scheme quantizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from smelt.core.errors import SettingError
from smelt.quantization.groupwise import GROUP_SIZE
from smelt.quantization.schemes.registry import (
    DEFAULT_SCHEME,
    GRAPH_SCHEMES,
    SCHEMES_BY_BITS,
    STATIC_SCHEME,
    find_scheme,
)
from smelt.stage import Settings

INT8_WEIGHTS, INT4_WEIGHTS = "int8-weight-only", SCHEMES_BY_BITS[4].name
WEIGHT_ONLY_SCHEMES = (INT8_WEIGHTS, INT4_WEIGHTS)
AUTO = "auto"
# Since this opset QuantizeLinear and DequantizeLinear have an axis, and so scales per output.
PER_CHANNEL_OPSET = 13
# Since this one DequantizeLinear has a scale per block, and 4-bit weights.
BLOCKED_OPSET = 21
QuantFormatName = Literal["qdq", "qoperator"]

if TYPE_CHECKING:
    OnnxScheme = str
    GroupSize = int
else:
    OnnxScheme = Literal[(*GRAPH_SCHEMES, *WEIGHT_ONLY_SCHEMES)]
    GroupSize = Literal[GROUP_SIZE.allowed]

# Conv would become ConvInteger, which uses one thread and does not support int8 weights on the CPU.
DYNAMIC_OPS = ("MatMul", "Gemm", "Attention", "LSTM", "EmbedLayerNormalization", "Gather")
# ReLU and Clip are fused into a convolution, which is faster and rounds once less. Others lose more than they
# gain: Add and Softmax raise the error of MiniLM from 0.17 to 0.6 of its standard deviation
# (docs/measurements/own-onnx.md).
_STATIC_OPS = ("Conv", "MatMul", "Gemm", "Relu", "Clip")
_NBITS_OPS = ("MatMul", "Gemm")
RECURRENT_OPS = ("LSTM", "GRU", "RNN")
WEIGHT_ONLY_OPS = (*_NBITS_OPS, "Conv", "ConvTranspose", *RECURRENT_OPS)
# A graph without any of these has nothing to quantize.
WEIGHTED_OPS = (*DYNAMIC_OPS, "Conv", "ConvTranspose", "GRU", "RNN")


class QuantizeOnnxSettings(Settings):
    """Settings of `quantize-onnx`."""

    scheme: OnnxScheme = Field(
        default=DEFAULT_SCHEME,
        description="int8-dynamic: activation ranges at run time; int8-static: calibrated (needed for"
        f" convolutions); {INT8_WEIGHTS}, {INT4_WEIGHTS}: weights only",
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
    granularity: Literal["channel", "tensor"] = Field(
        default="channel", description="the weights that share a scale: of an output channel, or all"
    )
    group_size: GroupSize | None = Field(
        default=None,
        description=f"inputs that share a scale; default: {INT4_WEIGHTS}: {GROUP_SIZE.default};"
        f" {INT8_WEIGHTS}: all",
    )
    symmetric: bool = Field(default=True, description=f"{INT4_WEIGHTS}: false: with zero points")
    accuracy_level: Literal[0, 4] = Field(
        default=4, description="MatMulNBits: activations: 4: int8 blocks, 0: float32"
    )
    target: Literal["ort-cpu", "tensorrt"] = Field(
        default="ort-cpu",
        description="ort-cpu: uint8 activations, MatMulNBits; tensorrt: symmetric int8, QDQ",
    )
    quant_format: QuantFormatName | None = Field(
        default=None,
        description="qdq: float operators after DequantizeLinear; qoperator: QLinear operators, MatMulNBits;"
        f" default: qdq, of {INT4_WEIGHTS} for ort-cpu qoperator",
    )
    opset: int | None = Field(
        default=None,
        ge=PER_CHANNEL_OPSET,
        description="of the result; default: the graph's, or what it needs",
    )
    op_types: tuple[str, ...] = Field(
        default=(),
        description="operators to quantize; default by scheme",
    )
    exclude: tuple[str, ...] = Field(
        default=(),
        description="nodes kept in float32: names, or patterns such as '*stft*'; auto: the most sensitive"
        " ones, until the difference is below max_difference",
    )
    max_excluded: int | None = Field(
        default=None, ge=1, description="exclude: auto: largest number of nodes; default: all"
    )
    sensitivity_samples: int = Field(
        default=8, ge=1, description="exclude: auto: samples for the sensitivity of nodes"
    )
    max_difference: float | None = Field(
        default=None,
        gt=0,
        description="largest root mean square error of an output, in its standard deviations; default by"
        " scheme",
    )

    @field_validator("exclude", mode="before")
    @classmethod
    def _convert_exclude(cls, value: Any) -> Any:
        return (value,) if value == AUTO else tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        for text, code in self._conflicts():
            raise SettingError(text, code=code)
        for name in sorted(set(self.model_fields_set) & set(self._effects)):
            if not self._effects[name]:
                raise SettingError(
                    f"{name} has no effect on {self._description}; remove it", code="unused-setting"
                )
        return self

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield combinations that cannot work, each with the code of its error."""
        if not self.uses_calibration and self.calibration_method != "minmax":
            yield (
                f"calibration_method is for {STATIC_SCHEME}; {self.scheme} computes no activation ranges"
                " before the run. Remove calibration_method",
                "settings-conflict",
            )
        if self.scheme == DEFAULT_SCHEME and self.target == "tensorrt":
            text = f"TensorRT does not support dynamic quantization. Set scheme: {STATIC_SCHEME}"
            yield text, "unsupported-target"
        if self.target == "tensorrt" and (self.quant_format == "qoperator" or not self.symmetric):
            text = "TensorRT supports symmetric QDQ only. Remove quant_format and symmetric"
            yield text, "unsupported-target"
        if self.scheme == DEFAULT_SCHEME and self.quant_format == "qdq":
            text = f"{DEFAULT_SCHEME} has no QDQ form. Remove quant_format, or set scheme: {STATIC_SCHEME}"
            yield text, "settings-conflict"
        needed = self.min_opset
        if self.opset is not None and self.opset < needed:
            text = f"opset {self.opset} has no 4-bit weights or group_size; set opset: {needed} or larger"
            yield text, "settings-conflict"
        unknown = sorted(set(self.op_types) - set(self._weight_only_ops)) if self.is_weight_only else []
        if unknown:
            text = f"{self._description} quantizes {', '.join(self._weight_only_ops)}, not {unknown[0]}"
            yield f"{text}. Remove it from op_types", "unsupported-operator"

    @property
    def _effects(self) -> dict[str, bool]:
        """Whether each setting that is not for all schemes has an effect."""
        return {
            "group_size": self.is_weight_only,
            "symmetric": self.uses_nbits,
            "accuracy_level": self.uses_nbits,
            "granularity": not (self.uses_nbits or self.block_size),
            "max_excluded": AUTO in self.exclude,
            "sensitivity_samples": AUTO in self.exclude,
        }

    def to_report(self) -> dict[str, Any]:
        """Return the settings that have an effect, as JSON values."""
        return {name: value for name, value in super().to_report().items() if self._effects.get(name, True)}

    @property
    def _description(self) -> str:
        return f"scheme: {self.scheme}{f', quant_format: {self.quant_format}' * bool(self.quant_format)}"

    @property
    def is_per_channel(self) -> bool:
        """Whether each output channel of a weight has a scale of its own."""
        return self.granularity == "channel"

    @property
    def is_weight_only(self) -> bool:
        """Whether activations are float."""
        return self.scheme in WEIGHT_ONLY_SCHEMES

    @property
    def bits(self) -> int:
        """The bits of a weight."""
        return 4 if self.scheme == INT4_WEIGHTS else 8

    @property
    def uses_qoperators(self) -> bool:
        """Whether quantized operators are written, not float operators with DequantizeLinear before them."""
        if self.quant_format is None:
            return self.scheme == INT4_WEIGHTS and self.target == "ort-cpu"
        return self.quant_format == "qoperator"

    @property
    def uses_nbits(self) -> bool:
        """Whether weights are written as MatMulNBits."""
        return self.is_weight_only and self.uses_qoperators

    @property
    def block_size(self) -> int:
        """The number of inputs that share a scale of a weight-only scheme, 0 for all."""
        if not self.is_weight_only:
            return 0
        blocked = self.uses_nbits or self.scheme == INT4_WEIGHTS
        return self.group_size or (int(GROUP_SIZE.default) if blocked else 0)

    @property
    def min_opset(self) -> int:
        """The opset that the operators of the result need."""
        return BLOCKED_OPSET if self.block_size and not self.uses_nbits else PER_CHANNEL_OPSET

    @property
    def uses_calibration(self) -> bool:
        """Whether activation ranges come from calibration samples."""
        return self.scheme == STATIC_SCHEME

    @property
    def _weight_only_ops(self) -> tuple[str, ...]:
        return _NBITS_OPS if self.uses_nbits or self.scheme == INT4_WEIGHTS else WEIGHT_ONLY_OPS

    @property
    def quantized_op_types(self) -> list[str]:
        """The operators to quantize."""
        default = self._weight_only_ops if self.is_weight_only else DYNAMIC_OPS
        return list(self.op_types or (_STATIC_OPS if self.uses_calibration else default))

    # 8-bit weights differ less than 8-bit weights and activations, 4-bit ones by as much
    _WEIGHT_ONLY_LIMITS: ClassVar[dict[str, str]] = {
        INT8_WEIGHTS: DEFAULT_SCHEME,
        INT4_WEIGHTS: STATIC_SCHEME,
    }

    @property
    def difference_limit(self) -> float:
        """The largest difference from the float graph, in standard deviations of an output."""
        if self.max_difference is not None:
            return self.max_difference
        return find_scheme(self._WEIGHT_ONLY_LIMITS.get(self.scheme, self.scheme)).max_graph_error
