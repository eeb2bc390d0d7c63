"""The setting `engine` of `onnx`: options of ONNX Runtime's TensorRT providers."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from smelt.core.stage import Settings
from smelt.export.tensorrt.settings import LengthSettings, TensorrtSettings


class ProviderSettings(Settings):
    """Options of engines that ONNX Runtime builds when a graph is first opened."""

    workspace_mib: int = Field(default=2048, ge=16, le=1 << 20, description="GPU memory for kernels, MiB")
    optimization_level: int = Field(default=3, ge=0, le=5, description="0 (fast build) to 5 (longest search)")
    timing_cache: bool = Field(default=True, description="keep kernel timings for faster builds")
    hardware_compatibility: Literal["none", "ampere+"] = Field(
        default="none", description="ampere+: all GPUs since Ampere"
    )
    context_memory: Literal["dedicated", "shared"] = Field(
        default="dedicated", description="shared: one activation memory for all parts of a graph"
    )
    max_batch_size: int = Field(default=8, ge=1, le=4096, description="as in `tensorrt`")
    opt_batch_size: int = Field(default=1, ge=1, le=4096, description="as in `tensorrt`")
    lengths: LengthSettings | None = Field(default=None, description="as in `tensorrt`")
    length_percentile: float = Field(default=99.0, ge=50, le=100, description="as in `tensorrt`")
    max_new_tokens: int | None = Field(default=None, ge=1, le=4096, description="as in `tensorrt`")

    @model_validator(mode="after")
    def _check_batch_sizes(self) -> Self:
        self.as_tensorrt_settings()
        return self

    def as_tensorrt_settings(self) -> TensorrtSettings:
        """Return the settings of the stage `tensorrt` with the same sizes."""
        return TensorrtSettings(
            max_batch_size=self.max_batch_size,
            opt_batch_size=self.opt_batch_size,
            lengths=self.lengths,
            length_percentile=self.length_percentile,
            max_new_tokens=self.max_new_tokens,
        )

    def unsupported_by_rtx(self) -> list[str]:
        """Return the given settings that TensorRT for RTX does not support."""
        only = ("optimization_level", "timing_cache", "hardware_compatibility", "context_memory")
        return [name for name in only if name in self.model_fields_set]
