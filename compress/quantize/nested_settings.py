"""Settings within those of `quantize`: what stays in float, mixed precision, low-rank correction."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.quantization.schemes.registry import SCHEMES_BY_BITS
from smelt.stage import Settings


class MaxExcluded(Settings):
    """How many layers `exclude: auto` may keep in float; a tenth of them by default."""

    layers: int | None = Field(default=None, ge=0, description="largest number of layers; default: a tenth")
    sensitivity: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="exclude layers until the others have at most this fraction of the total sensitivity",
    )


class MixedPrecision(Settings):
    """Bits for each layer by its sensitivity. Give one of target_bits and max_degradation."""

    target_bits: float | None = Field(
        default=None, gt=0, description="mean bits per weight, scales and zero points included"
    )
    max_degradation: float | None = Field(
        default=None,
        ge=0,
        description="instead of target_bits: largest drop of metric on validation data",
    )
    metric: str | None = Field(
        default=None, description="metric of max_degradation; default: the first of score.quality"
    )
    bit_widths: list[Literal[tuple(SCHEMES_BY_BITS)]] = Field(  # type: ignore[valid-type]
        default=sorted(SCHEMES_BY_BITS), min_length=2, description="bits to choose from"
    )

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if (self.target_bits is None) == (self.max_degradation is None):
            raise SettingError("set either target_bits or max_degradation", code="settings-conflict")
        if self.metric is not None and self.max_degradation is None:
            raise SettingError(
                "metric has no effect without max_degradation; set max_degradation, or remove metric",
                code="unused-setting",
            )
        if len(set(self.bit_widths)) < len(self.bit_widths):
            raise SettingError(
                f"bit_widths {self.bit_widths} contains a number twice; remove one", code="duplicate-value"
            )
        return self


class LowRankCorrection(Settings):
    """Two thin float matrices next to each quantized linear layer, the output layer excepted."""

    rank: int = Field(default=32, ge=0, description="at most the smaller dimension of a layer; 0: none")
    iterations: int = Field(
        default=1,
        ge=1,
        le=100,
        description="alternating updates of both parts; the best is kept",
    )
    init: Literal["quantize", "svd"] = Field(
        default="quantize",
        description="quantize: quantize first, correct the error; svd: take out the largest singular"
        " directions first",
    )
    objective: Literal["weights", "inputs", "outputs"] = Field(
        default="weights",
        description="error that is minimized: of weights, of weights scaled by mean inputs, of outputs",
    )
