"""The settings of `onnx`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self, cast

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings
from smelt.export.autotune.settings import AutotuneSettings
from smelt.export.tensorrt.provider_settings import ProviderSettings
from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS
from smelt.runtime.schemes.scheme import graph_target

if TYPE_CHECKING:
    from smelt.runtime.layers.emit import GraphTarget


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
    opset: int = Field(default=20, ge=19, le=23, description="opset of ONNX's standard operators")
    generation_graph: bool = Field(
        default=True,
        description="ort-cpu: also export the whole generation loop as one graph",
    )
    autotune: AutotuneSettings | bool = Field(
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
    def graph_target(self) -> GraphTarget:
        """The target whose graphs are exported: `target`, or the one whose graphs it uses."""
        return cast("GraphTarget", graph_target(self.target))

    @property
    def is_machine_dependent(self) -> bool:
        """Whether the artifact depends on the machine that produces it."""
        return bool(self.autotune) or self.threads == "autotune"

    @property
    def autotune_settings(self) -> AutotuneSettings:
        """The batch size and beams that autotune measures for."""
        return self.autotune if isinstance(self.autotune, AutotuneSettings) else AutotuneSettings()

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.target == "ort-cpu" and self.dtype == "fp16":
            raise SettingError(
                "dtype fp16 is for GPUs; on the CPU ONNX Runtime converts to float32 at every operator. Set"
                " dtype: fp32",
                code="unsupported-dtype",
            )
        if self.target == "openvino" and self.dtype == "fp16":
            raise SettingError(
                "dtype fp16 is for GPUs. With target openvino set dtype: fp32 or bf16",
                code="unsupported-dtype",
            )
        if self.target == "ort-cpu" and self.dtype == "bf16":
            raise SettingError(
                "dtype bf16 is for GPUs and OpenVINO; on the CPU ONNX Runtime has no bf16 matrix"
                " multiplication. Set target: openvino, or dtype: fp32",
                code="unsupported-dtype",
            )
        if self.autotune and self.target != "ort-cpu":
            raise SettingError(
                "autotune chooses between operators of ONNX Runtime on the CPU. Set target: ort-cpu, or"
                " remove autotune",
                code="unused-setting",
            )
        if self.threads is not None and self.target not in ("ort-cpu", "openvino"):
            raise SettingError(
                f"threads applies to graphs on the CPU, but target {self.target} is for GPUs. Remove threads",
                code="unused-setting",
            )
        if self.kv_cache == "int8" and self.target != "ort-cpu":
            raise SettingError(
                "kv_cache: int8 needs ONNX Runtime's attention on the CPU, but target is"
                f" {self.target}. Set kv_cache: float, or target: ort-cpu",
                code="unused-setting",
            )
        if self.tf32 and (self.target != "ort-cuda" or self.dtype != "fp32"):
            raise SettingError(
                "tf32 requires target: ort-cuda and dtype: fp32. Remove tf32", code="unused-setting"
            )
        if self.engine is not None and self.target not in PROVIDERS:
            raise SettingError(
                f"engine is for target ort-tensorrt or ort-tensorrt-rtx, but target is {self.target}. Remove"
                " engine, or move it into a `tensorrt` step",
                code="unused-setting",
            )
        if self.target == "ort-tensorrt-rtx" and self.engine and (said := self.engine.unsupported_by_rtx()):
            raise SettingError(
                f"TensorRT for RTX does not support engine: {{{', '.join(said)}}}. Remove it",
                code="unsupported-setting",
            )
        return self
