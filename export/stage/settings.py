"""The settings of `onnx`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self, cast

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings
from smelt.export.tensorrt.provider_settings import ProviderSettings
from smelt.export.tune.settings import Autotune
from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS
from smelt.runtime.schemes.scheme import graphs_for

if TYPE_CHECKING:
    from smelt.runtime.layers.emit import Target


class OnnxSettings(Settings):
    """Settings of `onnx`."""

    target: Literal["ort-cpu", "ort-cuda", "tensorrt", "openvino", "ort-tensorrt", "ort-tensorrt-rtx"] = (
        Field(
            default="ort-cpu",
            description="runtime",
        )
    )
    dtype: Literal["fp32", "fp16", "bf16"] = Field(
        default="fp32",
        description="fp16, bf16: for GPUs; openvino computes in bf16",
    )
    simplify: bool = Field(default=True, description="run onnxsim; keep its result if it computes the same")
    opset: int = Field(default=20, ge=19, le=23, description="of the standard operators")
    generation_graph: bool = Field(
        default=True,
        description="ort-cpu: also export the whole generation loop as one graph",
    )
    autotune: Autotune | bool = Field(
        default=False,
        description="ort-cpu: measure which operator each quantized layer uses",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["autotune"] | None = Field(
        default=None,
        description="ort-cpu, openvino: the artifact's default; autotune: measure 1 to all cores",
    )
    engine: ProviderSettings | None = Field(
        default=None,
        description="ort-tensorrt, ort-tensorrt-rtx: engine options",
    )
    kv_cache: Literal["float", "int8"] = Field(
        default="float",
        description="ort-cpu, decoder-only: type of stored keys and values",
    )
    tf32: bool = Field(
        default=False,
        description="ort-cuda: float32 matrix multiplications in TF32",
    )

    @property
    def graphs_of(self) -> Target:
        """The target whose graphs are exported: `target`, or the one that it shares graphs with."""
        return cast("Target", graphs_for(self.target))

    @property
    def measures(self) -> bool:
        """Whether the artifact depends on the machine that makes it."""
        return bool(self.autotune) or self.threads == "autotune"

    @property
    def tuned_for(self) -> Autotune:
        """The use that autotune measures for."""
        return self.autotune if isinstance(self.autotune, Autotune) else Autotune()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.target == "ort-cpu" and self.dtype == "fp16":
            raise SettingError(
                "dtype fp16 is for GPUs; on the CPU ONNX Runtime converts back at every step",
                code="unsupported-dtype",
            )
        if self.target == "openvino" and self.dtype == "fp16":
            raise SettingError(
                "dtype fp16 is for GPUs; with target openvino set fp32 or bf16", code="unsupported-dtype"
            )
        if self.target == "ort-cpu" and self.dtype == "bf16":
            raise SettingError(
                "dtype bf16 is for GPUs and OpenVINO: on the CPU ONNX Runtime has no matrix multiplication"
                " in it; set"
                " target: openvino, or dtype: fp32",
                code="unsupported-dtype",
            )
        if self.autotune and self.target != "ort-cpu":
            raise SettingError(
                "autotune chooses between operators of ONNX Runtime on the CPU; set target: ort-cpu, or"
                " remove it",
                code="unused-setting",
            )
        if self.threads is not None and self.target not in ("ort-cpu", "openvino"):
            raise SettingError(
                f"threads is for graphs that run on the CPU; target {self.target} is for GPUs: remove it",
                code="unused-setting",
            )
        if self.kv_cache == "int8" and self.target != "ort-cpu":
            raise SettingError(
                "kv_cache: int8 is an input of ONNX Runtime's attention on the CPU, and target is"
                f" {self.target}: set kv_cache: float, or target: ort-cpu",
                code="unused-setting",
            )
        if self.tf32 and (self.target != "ort-cuda" or self.dtype != "fp32"):
            raise SettingError("tf32 is for target ort-cuda and dtype fp32; remove it", code="unused-setting")
        if self.engine is not None and self.target not in PROVIDERS:
            raise SettingError(
                f"engine is for target ort-tensorrt and ort-tensorrt-rtx, and target is {self.target}: remove"
                " it, or put it into a `tensorrt` step",
                code="unused-setting",
            )
        if self.target == "ort-tensorrt-rtx" and self.engine and (said := self.engine.unknown_to_rtx()):
            raise SettingError(
                f"TensorRT for RTX has no option for engine: {{{', '.join(said)}}}: remove it",
                code="unsupported-setting",
            )
        return self
