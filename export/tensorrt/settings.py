"""The settings of the stage `tensorrt`, and the setting `engine` of `onnx`.

`engine` has options of ONNX Runtime's TensorRT provider.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings
from smelt.export.tensorrt.build_engine import HardwareCompatibility, WeightStorage


class LengthSettings(Settings):
    """Input lengths in tokens that the engine is built for: fastest at `opt`, at most `max`."""

    opt: int = Field(ge=1, description="fastest length")
    max: int = Field(ge=1, description="longest input")

    @model_validator(mode="after")
    def _check_order(self) -> LengthSettings:
        if self.opt > self.max:
            raise SettingError(
                f"opt ({self.opt}) must not be greater than max ({self.max}). Change one of them",
                code="opt-above-max",
            )
        return self


class ProfileSettings(Settings):
    """One of several optimization profiles; omitted settings are those of the step."""

    max_batch_size: int | None = Field(default=None, ge=1, le=4096, description="default: the step's")
    opt_batch_size: int | None = Field(default=None, ge=1, le=4096, description="default: the step's")
    lengths: LengthSettings | None = Field(default=None, description="default: the step's")
    length_percentile: float | None = Field(default=None, ge=1, le=100, description="default: the step's")

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.lengths is not None and self.length_percentile is not None:
            raise SettingError(
                "a profile cannot have both lengths and length_percentile. Remove one",
                code="settings-conflict",
            )
        return self


class TensorrtSettings(Settings):
    """Settings of `tensorrt`."""

    workspace_mib: int = Field(default=2048, ge=16, le=1 << 20, description="GPU memory for kernels, MiB")
    optimization_level: int = Field(default=3, ge=0, le=5, description="0 (fast build) to 5 (longest search)")
    tf32: bool = Field(default=True, description="compute float32 matrix multiplications in TF32")
    timing_cache: bool = Field(default=True, description="keep kernel timings for faster builds")
    hardware_compatibility: HardwareCompatibility = Field(
        default="none", description="other GPUs that the engine runs on"
    )
    version_compatible: bool = Field(default=False, description="also runs with later TensorRT versions")
    weights: WeightStorage = Field(
        default="embedded",
        description="refittable: can be replaced; stripped: read from the ONNX file at loading",
    )
    max_batch_size: int = Field(default=8, ge=1, le=4096, description="larger batches are split")
    opt_batch_size: int = Field(default=1, ge=1, le=4096, description="fastest batch")
    lengths: LengthSettings | None = Field(default=None, description="in tokens; default from the data")
    length_percentile: float = Field(
        default=99.0, ge=50, le=100, description="percentile of the data's lengths for lengths.max"
    )
    profiles: list[ProfileSettings] = Field(
        default_factory=list,
        max_length=8,
        description="optimization profiles; each call uses the smallest that fits, one must cover the others",
    )
    max_new_tokens: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="longest output; default score.generation's, else the model's",
    )

    @model_validator(mode="after")
    def _check_batch_sizes(self) -> Self:
        for profile in self.each_profile():
            if profile.opt_batch_size > profile.max_batch_size:
                raise SettingError(
                    f"opt_batch_size ({profile.opt_batch_size}) must not be greater than max_batch_size"
                    f" ({profile.max_batch_size}). Change one of them",
                    code="opt-above-max",
                )
        return self

    def each_profile(self) -> list[TensorrtSettings]:
        """Return these settings once per profile, with that profile's own values."""
        if not self.profiles:
            return [self]
        return [self._with_profile(profile) for profile in self.profiles]

    def _with_profile(self, profile: ProfileSettings) -> TensorrtSettings:
        explicit = {
            n: getattr(profile, n) for n in profile.model_fields_set if getattr(profile, n) is not None
        }
        if "length_percentile" in explicit:
            explicit["lengths"] = None
        if "max_batch_size" in explicit:  # a smaller profile than the step's own
            explicit.setdefault("opt_batch_size", min(self.opt_batch_size, explicit["max_batch_size"]))
        return self.model_copy(update={**explicit, "profiles": []})


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
