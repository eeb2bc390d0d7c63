"""The settings of the stage `tensorrt`."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings
from smelt.export.tensorrt.build import Compatibility, Weights


class Lengths(Settings):
    """Input lengths in tokens that the engine is built for: it is fastest at `opt`, refuses above `max`."""

    opt: int = Field(ge=1)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Lengths:
        if self.opt > self.max:
            raise SettingError(
                f"opt ({self.opt}) must not be greater than max ({self.max})", code="opt-above-max"
            )
        return self


class Profile(Settings):
    """One of several optimization profiles; what it does not say is as the step says it.

    max_batch_size, opt_batch_size: the largest batch, and the one that it is fastest at. lengths, or
    length_percentile: of the input in tokens.
    """

    max_batch_size: int | None = Field(default=None, ge=1, le=4096)
    opt_batch_size: int | None = Field(default=None, ge=1, le=4096)
    lengths: Lengths | None = None
    length_percentile: float | None = Field(default=None, ge=1, le=100)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.lengths is not None and self.length_percentile is not None:
            raise SettingError(
                "give a profile lengths or length_percentile, not both", code="settings-conflict"
            )
        return self


class TensorrtSettings(Settings):
    """Settings of `tensorrt`.

    workspace_mib: GPU memory that kernels may use for themselves, MiB. optimization_level: 0 (quick
    build) to 5 (longest search). tf32: let fp32 products use TF32. timing_cache: keep kernel timings in
    the user's cache folder, so that later builds are quicker. hardware_compatibility: GPUs the engine
    runs on besides this one. version_compatible: runs under later versions of TensorRT too. weights:
    inside the engine; `refittable` ones can be replaced; `outside`, they stay in the ONNX file, which goes
    along and is read when the engine is loaded. max_batch_size: largest batch of one call; greater ones are
    split. opt_batch_size: the one it is fastest at. lengths: of the input; from the data where not given
    (median and `length_percentile`). profiles: several, of which each call takes the smallest that fits; one
    of them must take all that any other takes. max_new_tokens: longest output; where not given that of
    `score: {generation: ...}`, else the model's own, else 128.
    """

    workspace_mib: int = Field(default=2048, ge=16, le=1 << 20)
    optimization_level: int = Field(default=3, ge=0, le=5)
    tf32: bool = True
    timing_cache: bool = True
    hardware_compatibility: Compatibility = "none"
    version_compatible: bool = False
    weights: Weights = "inside"
    max_batch_size: int = Field(default=8, ge=1, le=4096)
    opt_batch_size: int = Field(default=1, ge=1, le=4096)
    lengths: Lengths | None = None
    length_percentile: float = Field(default=99.0, ge=50, le=100)
    profiles: list[Profile] = Field(default_factory=list, max_length=8)
    max_new_tokens: int | None = Field(default=None, ge=1, le=4096)

    @model_validator(mode="after")
    def _batches(self) -> Self:
        for profile in self.each_profile():
            if profile.opt_batch_size > profile.max_batch_size:
                raise SettingError(
                    f"opt_batch_size ({profile.opt_batch_size}) must not be greater than max_batch_size"
                    f" ({profile.max_batch_size})",
                    code="opt-above-max",
                )
        return self

    def each_profile(self) -> list[TensorrtSettings]:
        """Return these settings once for each profile, with what that one says for itself."""
        if not self.profiles:
            return [self]
        return [self._with(profile) for profile in self.profiles]

    def _with(self, profile: Profile) -> TensorrtSettings:
        said = {n: getattr(profile, n) for n in profile.model_fields_set if getattr(profile, n) is not None}
        if "length_percentile" in said:
            said["lengths"] = None
        if "max_batch_size" in said:  # a smaller profile than the step's own
            said.setdefault("opt_batch_size", min(self.opt_batch_size, said["max_batch_size"]))
        return self.model_copy(update={**said, "profiles": []})
