"""The setting `engine` of `onnx`: what ONNX Runtime's providers of TensorRT are told of their engines."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from smelt.core.stage import Settings
from smelt.export.tensorrt.settings import Lengths, TensorrtSettings


class ProviderSettings(Settings):
    """Engines that ONNX Runtime builds when a graph is opened for the first time.

    workspace_mib: GPU memory that kernels may use for themselves, MiB. optimization_level: 0 (quick build) to
    5 (longest search). timing_cache: keep kernel timings in the user's cache folder.
    hardware_compatibility: `ampere+` builds engines for all GPUs since Ampere. context_memory: parts of a
    graph share the memory in which they work. max_batch_size, opt_batch_size, lengths, length_percentile,
    max_new_tokens: as of the stage `tensorrt`.
    """

    workspace_mib: int = Field(default=2048, ge=16, le=1 << 20)
    optimization_level: int = Field(default=3, ge=0, le=5)
    timing_cache: bool = True
    hardware_compatibility: Literal["none", "ampere+"] = "none"
    context_memory: Literal["own", "shared"] = "own"
    max_batch_size: int = Field(default=8, ge=1, le=4096)
    opt_batch_size: int = Field(default=1, ge=1, le=4096)
    lengths: Lengths | None = None
    length_percentile: float = Field(default=99.0, ge=50, le=100)
    max_new_tokens: int | None = Field(default=None, ge=1, le=4096)

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        self.as_engine()
        return self

    def as_engine(self) -> TensorrtSettings:
        """Return the settings of the stage `tensorrt` that ask for the same sizes."""
        return TensorrtSettings(
            max_batch_size=self.max_batch_size,
            opt_batch_size=self.opt_batch_size,
            lengths=self.lengths,
            length_percentile=self.length_percentile,
            max_new_tokens=self.max_new_tokens,
        )

    def unknown_to_rtx(self) -> list[str]:
        """Return what was said that TensorRT for RTX has no option for."""
        only = ("optimization_level", "timing_cache", "hardware_compatibility", "context_memory")
        return [name for name in only if name in self.model_fields_set]
