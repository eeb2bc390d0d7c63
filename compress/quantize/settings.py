"""Settings of `quantize`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from smelt.compress.quantize.methods import (
    AWQ_METHODS,
    BLOCK_METHODS,
    CALIBRATED_METHODS,
    Method,
    methods_for,
    schemes_for,
    supports_scheme,
)
from smelt.compress.quantize.nested_settings import LowRankCorrection, MaxExcluded, MixedPrecision
from smelt.compress.quantize.scheme_settings import (
    EMBEDDING_SCHEME,
    MODEL_PARTS,
    EmbeddingScheme,
    PartSchemeSettings,
    check_scheme_options,
    resolve_options,
    shared_options,
    unused_options,
)
from smelt.core.errors import SettingError
from smelt.core.messages import Message, warning
from smelt.quantization.groupwise import ACCURACY_LEVEL, ACTIVATION_BITS
from smelt.quantization.scheme import OptionValue
from smelt.quantization.schemes.registry import (
    SCHEMES,
    SCHEMES_BY_BITS,
    bits_per_weight,
)


def two_bit_warnings(schemes: Iterable[str]) -> list[Message]:
    """Return a warning if two-bit schemes are among `schemes`, by name."""
    two_bit_schemes = sorted(name for name in schemes if SCHEMES[name].bits == 2)
    return [
        warning(
            "hqq-two-bits",
            "method: hqq clips the range of the weights, which lowers the quality of most models with"
            f" {name} (docs/reference/stages/quantize.md#hqq). Compare with method: rtn, or with"
            " gptq if there are samples.",
            setting="method",
        )
        for name in two_bit_schemes
    ]


# special pattern of `exclude`: the most sensitive layers
AUTO = "auto"
_SENSITIVITY_SAMPLES = 8  # where layers are chosen by their sensitivity
_RANGE_SCHEMES = ", ".join(name for name, scheme in SCHEMES.items() if scheme.requires_calibration)
_FLOAT_RANGE_SCHEMES = ", ".join(name for name, scheme in SCHEMES.items() if scheme.has_float_activations)
_FLOAT_TABLE_SCHEMES = ", ".join(name for name, scheme in SCHEMES.items() if not scheme.quantizes_tables)
_SMOOTHQUANT_SCHEMES = ", ".join(name for name, scheme in SCHEMES.items() if scheme.per_tensor_activations)
CalibrationMethod = Literal["minmax", "percentile", "entropy", "mse"]
ActOrder = Literal["static", "none"]
# they have an effect with some methods
_METHOD_SETTINGS = ("act_order", "gptaq_alpha", "duo_scaling", "iterations")


class QuantizeSettings(PartSchemeSettings):
    """Settings of `quantize`.

    The output layer is the projection to the vocabulary, or a classifier's last layer.
    """

    method: Method = Field(
        default="rtn",
        description="rtn: round to nearest; gptq: column by column with compensation; awq: scale channels"
        " with large activations first; awq-gptq: both; hqq: optimize the grid without data; "
        + "; ".join(
            f"{name}: {method.summary}: {', '.join(schemes_for(name))}"
            for name, method in BLOCK_METHODS.items()
        ),
    )
    iterations: int = Field(
        default=200, ge=1, description=f"{', '.join(BLOCK_METHODS)}: updates of each block"
    )
    act_order: ActOrder = Field(
        default="static",
        description="gptq, awq-gptq: order of the columns: static: by decreasing mean squared input; none:"
        " from left to right",
    )
    gptaq_alpha: float | None = Field(
        default=None,
        gt=0,
        le=1,
        strict=True,
        description="gptq, awq-gptq: strength of GPTAQ, which targets the outputs of the float model; 0.25 is"
        " usual",
    )
    duo_scaling: bool = Field(
        default=True,
        description="awq, awq-gptq: scale channels by their weights, too",
    )
    clip: Literal["none", "mse", "percentile", "awq"] = Field(
        default="none",
        description="range of weights: mse: least sum of |error|^2.4, for 4 bits in groups of 32 without"
        " data; percentile: calibration_percentile; awq: least output error",
    )
    mixed_precision: MixedPrecision | None = Field(
        default=None,
        description="instead of scheme: choose the bits of each layer by sensitivity",
    )
    low_rank_correction: LowRankCorrection | None = Field(
        default=None,
        description="a low-rank float correction of the error",
    )
    exclude: list[str] = Field(
        default_factory=list,
        description="patterns of names of modules kept in float; auto: the most sensitive layers",
    )
    max_excluded: MaxExcluded | None = Field(default=None, description="limits of `exclude: auto`")
    calibration_method: CalibrationMethod | None = Field(
        default=None,
        description=f"{_RANGE_SCHEMES}: how activation ranges are found; default: percentile,"
        f" {_FLOAT_RANGE_SCHEMES}: minmax",
    )
    calibration_percentile: float = Field(
        default=99.99,
        gt=50,
        le=100,
        description=f"{_RANGE_SCHEMES}, and clip: percentile",
    )
    smoothquant_alpha: float | None = Field(
        default=None,
        ge=0,
        le=1,
        strict=True,
        description=f"{_SMOOTHQUANT_SCHEMES}: SmoothQuant's strength; 0.5 is usual",
    )
    smoothquant_targets: list[Literal["norms", "layers", "factors"]] = Field(
        default=["norms", "layers"],
        min_length=1,
        description="what divides the inputs: norms; layers: those that compute values, or the ungated half"
        " of a feed-forward part; factors: for all other inputs, a multiplication in the graph",
    )
    calibration_samples: int | None = Field(
        default=None,
        ge=1,
        description="calibration samples; default: ten tokens for each input of the widest layer",
    )
    sensitivity_samples: int | None = Field(
        default=None,
        ge=0,
        description="samples for the sensitivity of layers; default: 8 with exclude: auto or"
        " mixed_precision, otherwise it is not measured",
    )
    embeddings: bool | None = Field(
        default=None,
        description=f"quantize token embeddings; default: true, with {_FLOAT_TABLE_SCHEMES} only if"
        " embedding_scheme is set",
    )
    output_layer: bool | None = Field(
        default=None, description="quantize the output layer; default: as embeddings"
    )
    embedding_scheme: EmbeddingScheme | None = Field(default=None, description=EMBEDDING_SCHEME)

    @field_validator("exclude", mode="before")
    @classmethod
    def _convert_auto(cls, value: Any) -> Any:
        return [value] if value == AUTO else value

    @property
    def _scheme_description(self) -> str:
        if self.mixed_precision is not None:
            return "the schemes of mixed_precision"
        return f"scheme {' and '.join(self.linear_schemes)}"

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        self._check_bits()
        self._check_smoothquant()
        self._check_rows()
        self._check_clip()
        self._check_method()
        check_scheme_options(
            self.linear_schemes,
            self,
            self._scheme_description,
            mixed=self.mixed_precision is not None,
            tables=self.used_schemes(),
        )
        levels = (getattr(self, ACTIVATION_BITS.name), getattr(self, ACCURACY_LEVEL.name))
        if levels[0] is not None and levels[1] == 0:
            raise SettingError(
                f"activation_bits {levels[0]} has no effect with accuracy_level: 0, which keeps activations"
                " float32; remove one of them",
                code="settings-conflict",
            )
        return self

    def _check_bits(self) -> None:
        """Refuse target bits that no choice of widths reaches, and settings that mixed_precision replaces.

        Raises:
            ValueError: there is one.
        """
        if self.mixed_precision is None:
            return
        for name, replaced in (
            ("scheme", "the bit widths"),
            ("embedding_scheme", "the bit widths, also of embeddings and output layer"),
            ("smoothquant_alpha", "groupwise schemes, whose activations have no shared scale"),
        ):
            if name in self.model_fields_set:
                raise SettingError(
                    f"mixed_precision chooses {replaced}; remove {name}", code="settings-conflict"
                )
        if AUTO in self.exclude:
            raise SettingError(
                "mixed_precision and exclude: auto both choose by sensitivity; remove one of them",
                code="settings-conflict",
            )
        if not self.num_sensitivity_samples:
            raise SettingError(
                "mixed_precision needs the sensitivity of each layer; sensitivity_samples must be 1 or more",
                code="too-few-rows",
            )
        stored_bits = {
            b: bits_per_weight(SCHEMES_BY_BITS[b], self.scheme_options(SCHEMES_BY_BITS[b].name))
            for b in self.mixed_precision.bit_widths
        }
        min_bits, max_bits = min(stored_bits.values()), max(stored_bits.values())
        if (
            self.mixed_precision.target_bits is not None
            and not min_bits <= self.mixed_precision.target_bits < max_bits
        ):
            raise SettingError(
                f"mixed_precision: expected target_bits of at least {min_bits:g} and less than {max_bits:g},"
                " the bits per weight of these bit_widths including scales, got"
                f" {self.mixed_precision.target_bits:g}",
                code="budget-out-of-range",
            )

    def _check_smoothquant(self) -> None:
        """Reject settings of SmoothQuant that have no effect, or conflict with others.

        Raises:
            SettingError: there is one.
        """
        if self.smoothquant_alpha is None:
            if "smoothquant_targets" in self.model_fields_set:
                raise SettingError(
                    "smoothquant_targets requires smoothquant_alpha; set it (0.5 is usual)",
                    code="unused-setting",
                )
        elif not any(SCHEMES[name].per_tensor_activations for name in self.linear_schemes):
            raise SettingError(
                f"smoothquant_alpha applies only to {_SMOOTHQUANT_SCHEMES}, which have one scale for"
                f" all activations of a layer, and scheme is {self.scheme_text}; remove it",
                code="unused-setting",
            )
        elif "factors" in self.smoothquant_targets and self.scales_inputs:
            raise SettingError(
                f"smoothquant_targets: factors and method: {self.method} both insert factors; remove one",
                code="settings-conflict",
            )

    def _check_range_method(self) -> None:
        """Refuse searches of ranges for integers where activations are floats.

        Raises:
            SettingError: it is one.
        """
        are_floats = any(SCHEMES[name].has_float_activations for name in self.used_schemes())
        if are_floats and self.range_method in ("entropy", "mse"):
            raise SettingError(
                f"calibration_method: {self.range_method} searches a range for integers, and activations of"
                f" {_FLOAT_RANGE_SCHEMES} are floats. Set minmax or percentile",
                code="settings-conflict",
            )

    def _check_rows(self) -> None:
        """Refuse settings that need another one, or samples that nothing uses.

        Raises:
            ValueError: there is one.
        """
        set_fields = self.model_fields_set
        effects = {
            "act_order": self.compensates_rounding,
            "gptaq_alpha": self.compensates_rounding,
            "duo_scaling": self.scales_inputs,
            "iterations": self.tunes_blocks,
            "calibration_method": self.needs_activation_ranges,
            "calibration_percentile": self.needs_activation_ranges or self.clip == "percentile",
        }
        for name, means in effects.items():
            if name in set_fields and not means:
                method = f"method: {self.method} with " if name in _METHOD_SETTINGS else ""
                raise SettingError(
                    f"{name} has no effect on {method}{self._scheme_description}; remove it",
                    code="unused-setting",
                )
        for name, reads in (
            ("calibration_samples", self.needs_calibration),
            ("sensitivity_samples", self._may_measure_sensitivity),
        ):
            if name in set_fields and not reads:
                raise SettingError(
                    f"{name} has no effect: {self._scheme_description} is not calibrated on samples; remove"
                    " it",
                    code="unused-setting",
                )
        if "calibration_percentile" in set_fields and "percentile" not in (self.range_method, self.clip):
            raise SettingError(
                f"calibration_percentile has no effect with calibration_method: {self.range_method};"
                " remove it",
                code="unused-setting",
            )
        self._check_range_method()
        conflict = None
        if self.mixed_precision is not None:
            conflict = "mixed_precision"
        elif not isinstance(self.scheme, str):
            conflict = "one of the schemes"
        elif self.scales_inputs or self.tunes_blocks:
            conflict = f"method: {self.method}"
        if self.correction is not None and conflict is not None:
            raise SettingError(
                "low_rank_correction requires a single scheme and method rtn, gptq or hqq; remove"
                f" {conflict} or low_rank_correction",
                code="settings-conflict",
            )
        if self.correction is not None and self.gptaq_alpha is not None:
            raise SettingError(
                "gptaq_alpha does not apply to weights with low_rank_correction; remove one of them",
                code="settings-conflict",
            )
        if "max_excluded" in set_fields and AUTO not in self.exclude:
            raise SettingError(
                "max_excluded has no effect without exclude: auto; set exclude: auto, or remove max_excluded",
                code="unused-setting",
            )
        if AUTO in self.exclude and not self.num_sensitivity_samples:
            raise SettingError(
                "exclude: auto needs the sensitivity of each layer; sensitivity_samples must be 1 or more",
                code="too-few-rows",
            )

    def _check_clip(self) -> None:
        """Refuse clipping of a scheme without ranges, or where another setting chooses the ranges.

        Raises:
            ValueError: there is one.
        """
        if self.clip == "awq" and self.method != "awq":
            ways = "method: awq, or clip: mse or percentile" if self.compensates_rounding else "method: awq"
            raise SettingError(
                f"clip: awq requires method: awq, and method is {self.method}; use {ways}",
                code="settings-conflict",
            )
        fitted = [name for name in self.used_schemes() if not SCHEMES[name].supports_clipping]
        if self.clip in ("mse", "percentile") and fitted:
            raise SettingError(
                f"clip: {self.clip} has no effect on {fitted[0]}, whose values are fitted to all"
                " weights of a group; remove clip",
                code="settings-conflict",
            )
        if self.clip != "none" and (self.method == "hqq" or self.tunes_blocks):
            raise SettingError(
                f"method: {self.method} optimizes the ranges itself; remove clip: {self.clip}",
                code="settings-conflict",
            )

    def _check_method(self) -> None:
        """Refuse a method that does not support a scheme of the linear layers, or mixed precision.

        Raises:
            ValueError: it does not.
        """
        if self.tunes_blocks and self.mixed_precision is not None:
            raise SettingError(
                f"mixed_precision does not support method: {self.method}; use method: rtn or gptq, or set"
                " scheme",
                code="settings-conflict",
            )
        for name in self.linear_schemes:
            if not supports_scheme(self.method, SCHEMES[name]):
                raise SettingError(
                    f"method: {self.method} does not support scheme {name}. Use method"
                    f" {' or '.join(methods_for(SCHEMES[name]))}, or scheme"
                    f" {' or '.join(schemes_for(self.method))}",
                    code="settings-conflict",
                )

    @property
    def needs_activation_ranges(self) -> bool:
        """Whether a scheme needs the range of activations."""
        return any(
            SCHEMES[name].calibrates_activations(self.scheme_options(name)) for name in self.used_schemes()
        )

    @property
    def range_method(self) -> CalibrationMethod:
        """How activation ranges are found."""
        schemes = [SCHEMES[name] for name in self.used_schemes() if SCHEMES[name].requires_calibration]
        are_floats = bool(schemes) and all(scheme.has_float_activations for scheme in schemes)
        return self.calibration_method or ("minmax" if are_floats else "percentile")

    @property
    def scales_inputs(self) -> bool:
        """Whether channels with large activations are scaled up."""
        return self.method in AWQ_METHODS

    @property
    def compensates_rounding(self) -> bool:
        """Whether remaining columns compensate the rounding error."""
        return self.method in ("gptq", "awq-gptq")

    @property
    def tunes_blocks(self) -> bool:
        """Whether a block's weights are tuned together to the output of the float block."""
        return self.method in BLOCK_METHODS

    @property
    def rounds_in_blocks(self) -> bool:
        """Whether weights are rounded on the inputs of each block."""
        return self.compensates_rounding or self.tunes_blocks

    @property
    def needs_calibration(self) -> bool:
        """Whether calibration samples are used."""
        return (
            self.needs_activation_ranges
            or self.method in CALIBRATED_METHODS
            or self._may_measure_sensitivity
            or self.calibrates_correction
        )

    @property
    def correction(self) -> LowRankCorrection | None:
        """The low-rank correction, None without one."""
        return (
            self.low_rank_correction
            if self.low_rank_correction is not None and self.low_rank_correction.rank
            else None
        )

    @property
    def calibrates_correction(self) -> bool:
        """Whether the low-rank correction uses calibration samples."""
        return self.correction is not None and self.correction.objective != "weights"

    @property
    def loads_whole_model(self) -> bool:
        """Whether layers are compared, or the float model is calibrated after it was calibrated and scaled.

        Other settings process a large model block by block (`open_large_model`).
        """
        measured = self._may_measure_sensitivity and self.num_sensitivity_samples > 0
        ranges_of_scaled = self.needs_activation_ranges and self.method in CALIBRATED_METHODS
        scaled_twice = self.smoothquant_alpha is not None and self.scales_inputs
        return self.correction is not None or measured or ranges_of_scaled or scaled_twice

    @property
    def chooses_by_sensitivity(self) -> bool:
        """Whether the sensitivity of layers decides how they are quantized."""
        return AUTO in self.exclude or self.mixed_precision is not None

    @property
    def num_sensitivity_samples(self) -> int:
        """The samples for the sensitivity of layers; 0: it is not measured.

        Each layer needs runs of its own, so the time is quadratic in the number of layers. Where nothing is
        chosen by it, it is only measured on request.
        """
        if self.sensitivity_samples is not None:
            return self.sensitivity_samples
        return _SENSITIVITY_SAMPLES if self.chooses_by_sensitivity else 0

    @property
    def _may_measure_sensitivity(self) -> bool:
        return (
            self.needs_activation_ranges or self.smoothquant_alpha is not None or self.chooses_by_sensitivity
        )

    @property
    def exclude_patterns(self) -> list[str]:
        """The patterns of names in `exclude`."""
        return [pattern for pattern in self.exclude if pattern != AUTO]

    @property
    def quantizes_embeddings(self) -> bool:
        """Whether token embeddings are quantized."""
        return self._quantizes_tables if self.embeddings is None else self.embeddings

    @property
    def quantizes_output_layer(self) -> bool:
        """Whether the output layer is quantized."""
        return self._quantizes_tables if self.output_layer is None else self.output_layer

    @property
    def _quantizes_tables(self) -> bool:
        return (
            self.embedding_scheme is not None
            or self.mixed_precision is not None
            or SCHEMES[self.scheme_of("decoder")].quantizes_tables
        )

    @property
    def resolved_embedding_scheme(self) -> str:
        """The scheme of embeddings and output layer."""
        decoder_scheme = self.scheme_of("decoder")
        return self.embedding_scheme or SCHEMES[decoder_scheme].embedding_scheme or decoder_scheme

    @property
    def linear_schemes(self) -> tuple[str, ...]:
        """The schemes of the linear layers."""
        if self.mixed_precision is not None:
            return tuple(SCHEMES_BY_BITS[width].name for width in self.mixed_precision.bit_widths)
        return tuple(dict.fromkeys(map(self.scheme_of, MODEL_PARTS)))

    def used_schemes(self) -> tuple[str, ...]:
        """Return the schemes that are used, those of the linear layers first."""
        if self.mixed_precision is not None:
            return self.linear_schemes
        tables = (
            [self.resolved_embedding_scheme]
            if self.quantizes_embeddings or self.quantizes_output_layer
            else []
        )
        return tuple(dict.fromkeys((*self.linear_schemes, *tables)))

    def to_report(self) -> dict[str, Any]:
        """Return what a report shows: options as the schemes take them, without unused ones.

        As settings in a recipe they give the same quantized weights.
        """
        dumped = super().to_report() | shared_options(self.used_schemes(), self)
        dumped |= {"embeddings": self.quantizes_embeddings, "output_layer": self.quantizes_output_layer}
        dumped["calibration_method"] = self.range_method
        dumped["sensitivity_samples"] = self.num_sensitivity_samples
        if self.mixed_precision is None:
            dumped["embedding_scheme"] = self.resolved_embedding_scheme
        unused = {name for name, means in self._effective_settings().items() if not means}
        unused |= unused_options(self.used_schemes(), self)
        return {name: value for name, value in dumped.items() if name not in unused}

    def _effective_settings(self) -> dict[str, bool]:
        """Return which settings have an effect, of those that others may switch off."""
        uniform = self.mixed_precision is None
        uses_percentile = "percentile" in (
            self.range_method if self.needs_activation_ranges else "",
            self.clip,
        )
        return {
            "scheme": uniform,
            "embedding_scheme": uniform and (self.quantizes_embeddings or self.quantizes_output_layer),
            "act_order": self.compensates_rounding,
            "gptaq_alpha": self.gptaq_alpha is not None,
            "duo_scaling": self.scales_inputs,
            "iterations": self.tunes_blocks,
            "calibration_method": self.needs_activation_ranges,
            "calibration_percentile": uses_percentile,
            "calibration_samples": self.needs_calibration,
            "sensitivity_samples": self._may_measure_sensitivity,
            "max_excluded": AUTO in self.exclude,
            "smoothquant_alpha": self.smoothquant_alpha is not None,
            "smoothquant_targets": self.smoothquant_alpha is not None,
        }

    def required_packages(self) -> dict[str, str]:
        """Return what the schemes need."""
        packages: dict[str, str] = {}
        for name in self.used_schemes():
            packages |= SCHEMES[name].packages
        return packages

    def scheme_options(self, scheme: str) -> dict[str, OptionValue]:
        """Return the options of `scheme`, as a quantized layer takes them."""
        return resolve_options(scheme, self, self.linear_schemes)
