"""Settings of `rotate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from smelt.compress.quantize.scheme_settings import check_scheme_options, resolve_options, scheme_settings
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.core.errors import SettingError
from smelt.quantization.schemes.registry import SCHEMES, SCHEMES_BY_BITS, can_learn_ranges
from smelt.stage import Settings, StoredDtype

if TYPE_CHECKING:
    from smelt.compress.quantize.scheme_settings import SchemeSettings

    _LearnedScheme = SchemeSettings
else:
    _LearnedScheme = scheme_settings(
        [name for name, scheme in SCHEMES.items() if can_learn_ranges(scheme)], SCHEMES_BY_BITS[4].name
    )


class LearnedRotations(_LearnedScheme):
    """Rotations that are learned for the scheme of a later `quantize`, from the Hadamard matrices on."""

    iterations: int = Field(default=100, ge=1, description="updates")
    learning_rate: float = Field(default=1e-2, gt=0, description="initial learning rate of Adam")

    @property
    def quantization(self) -> QuantizeSettings:
        """The settings of `quantize` with this scheme and its options."""
        names = {"scheme", *(option.name for option in SCHEMES[self.scheme].option_specs)}
        return QuantizeSettings(**self.model_dump(include=names))

    def to_report(self) -> dict[str, Any]:
        """Return what a report shows: all options of the scheme, and no others."""
        report = super().to_report() | resolve_options(self.scheme, self)
        return {name: value for name, value in report.items() if value is not None}

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        check_scheme_options([self.scheme], self, f"scheme {self.scheme}", mixed=False)
        return self


class RotateSettings(Settings):
    """Settings of `rotate`."""

    targets: list[Literal["width", "heads"]] = Field(
        default=["width", "heads"],
        min_length=1,
        description="width: the hidden states; heads: the values of each head of attention",
    )
    method: Literal["hadamard", "pca"] = Field(
        default="hadamard",
        description="basis of the hidden states: a random Hadamard matrix, or their principal axes on"
        " calibration samples; values always get a Hadamard matrix",
    )
    learned: LearnedRotations | None = Field(
        default=None, description="learn the rotations for the scheme of a later quantize"
    )
    calibration_samples: int | None = Field(
        default=None, ge=1, description="for pca, learned; default: ten tokens per input of the widest layer"
    )
    dtype: StoredDtype = "keep"

    @property
    def needs_calibration(self) -> bool:
        """Whether calibration samples are used."""
        return self.method == "pca" or self.learned is not None

    def to_plan(self) -> dict[str, Any]:
        """Return what a plan shows: also the scheme that rotations are learned for, if it is the default."""
        shown = super().to_plan()
        if self.learned is not None:
            shown["learned"] = {"scheme": self.learned.scheme} | shown["learned"]
        return shown

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.calibration_samples and not self.needs_calibration:
            raise SettingError(
                "calibration_samples has no effect without method: pca or learned; remove it",
                code="unused-setting",
            )
        if self.method == "pca" and self.learned is not None:
            raise SettingError(
                "learned starts from Hadamard matrices; remove method: pca or learned",
                code="settings-conflict",
            )
        if self.method == "pca" and "width" not in self.targets:
            raise SettingError(
                "method: pca applies only to the hidden states; add width to targets", code="unused-setting"
            )
        return self
