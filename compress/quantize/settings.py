"""The settings of `quantize`: what is quantized and how, beside the options that schemes declare."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from smelt.compress.quantize.from_schemes.meant import (
    as_by_default,
    check_options,
    options_for,
    taken_by,
    unused_by,
)
from smelt.compress.quantize.from_schemes.options import VOCABULARY, FromSchemes, TableScheme
from smelt.compress.quantize.sensitivity.settings import Bits, Budget
from smelt.core.errors import SettingError
from smelt.core.stage import Settings
from smelt.runtime.schemes.registry import SCHEMES, WIDTHS, bits_per_weight
from smelt.runtime.schemes.scheme import Value

# among the patterns of `skip`: what is most sensitive
AUTO = "auto"
_OBSERVING = ", ".join(name for name, scheme in SCHEMES.items() if scheme.observes)
_SMOOTHED = ", ".join(name for name, scheme in SCHEMES.items() if scheme.one_scale)
Method = Literal["minmax", "percentile", "entropy", "mse"]
# methods whose codes are those of a model with other scales of channels than the float one
SCALING = ("awq", "awq-gptq")
_READING = ("gptq", *SCALING)  # methods that look at rows


class LowRank(Settings):
    """A pair of thin float matrices beside the codes of each product, but for the output layer's."""

    rank: int = Field(
        default=32, ge=0, description="width of the pairs, at most the smaller side of a layer; 0: none"
    )
    iterations: int = Field(
        default=1,
        ge=1,
        le=100,
        description="how often codes and pair are found in turn, each for what the other leaves; the best"
        " is kept",
    )
    begin: Literal["codes", "pair"] = Field(
        default="codes",
        description="what is found first: codes, of the weights; or the pair, of the weights, so that their"
        " largest directions are not coded",
    )
    error: Literal["weights", "inputs", "outputs"] = Field(
        default="weights",
        description="in what the pair is nearest: the weights; the weights, each input's times its mean"
        " magnitude; the outputs (the last two look at rows)",
    )


class QuantizeSettings(FromSchemes):
    """What is quantized, and how.

    `head` is the output layer: the product with the vocabulary, or a classifier's last layer.
    """

    method: Literal["nearest", "gptq", "awq", "awq-gptq", "hqq"] = Field(
        default="nearest",
        description="how codes are chosen: nearest: each weight becomes the nearest value; gptq: and what"
        " that changes on rows is made up for by weights that are not rounded yet; awq: inputs that are large"
        " on rows get finer steps; awq-gptq: they do, and then gptq; hqq: the ranges are searched,"
        " without rows",
    )
    clip: Literal["none", "mse", "percentile", "awq"] = Field(
        default="none",
        description="ends of each range that are cut off: none; mse: as much as has the least error;"
        " percentile: what lies above it; awq: as much as has the least error of the outputs on rows",
    )
    bits: Bits | None = Field(
        default=None,
        description="mixed precision: of each layer as many bits as its damage on rows asks for, in place of"
        " scheme",
    )
    low_rank: LowRank | None = Field(
        default=None,
        description="a low-rank pair beside the codes, which makes good what they lose: {rank: 32}",
    )
    skip: list[str] = Field(
        default_factory=list,
        description="patterns of module names that stay float: `*.decoder.layers.0.*`; `auto`: those that"
        " hurt most when they alone are quantized",
    )
    budget: Budget | None = Field(default=None, description="how many layers `skip: auto` leaves float")
    range: Method = Field(
        default="percentile",
        description=f"{_OBSERVING}: how the range of activations is found",
    )
    percentile: float = Field(
        default=99.99,
        gt=50,
        le=100,
        description=f"{_OBSERVING}, clip: percentile: of magnitudes, inside the range",
    )
    smooth: float | None = Field(
        default=None,
        ge=0,
        le=1,
        strict=True,
        description=f"{_SMOOTHED}: SmoothQuant's alpha: how much of the outliers of activations goes from the"
        " norms into the weights that read them; 0.5 is usual",
    )
    rows: int = Field(
        default=128,
        ge=1,
        description=f"{_OBSERVING}, gptq, awq, awq-gptq, smooth, low_rank, skip: auto, bits: rows that"
        " are looked at (calibration, else train)",
    )
    damage_rows: int = Field(
        default=8,
        ge=0,
        description=f"{_OBSERVING}, smooth, skip: auto, bits: of them, those on which the damage of each"
        " layer is measured",
    )
    embeddings: bool = Field(default=True, description="quantize word embeddings")
    head: bool = Field(default=True, description="quantize the output layer")
    vocabulary: TableScheme | None = Field(default=None, description=VOCABULARY)

    # Settings that came later: where one is as it is by default, it is not written down, and changes no key.
    unsaid: ClassVar[frozenset[str]] = frozenset({"method", "clip", "bits", "low_rank"})

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        found: dict[str, Any] = handler(self)
        plain = {name: type(self).model_fields[name].default for name in self.unsaid}
        kept = {name: value for name, value in found.items() if name not in plain or value != plain[name]}
        same = as_by_default(self.schemes(), self)
        idle = not (self.embeddings or self.head)
        if self.vocabulary is not None and (idle or self.vocabulary == self._own_table_scheme):
            same["vocabulary"] = None
        if info.exclude_defaults:
            return {name: value for name, value in kept.items() if name not in same}
        return kept | same

    @field_validator("skip", mode="before")
    @classmethod
    def _one_word(cls, value: Any) -> Any:
        return [value] if value == AUTO else value

    @property
    def _who(self) -> str:
        return f"scheme {self.scheme}" if self.bits is None else "the schemes of bits (mixed precision)"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self._check_bits()
        self._check_rows()
        self._check_clip()
        check_options(self.schemes(), self, self._who, mixed=self.bits is not None)
        return self

    def _check_bits(self) -> None:
        """Refuse a budget that no choice of widths can have, and settings that choose widths themselves.

        Raises:
            ValueError: there is one.
        """
        if self.bits is None:
            return
        for name, why in (
            ("scheme", "the widths"),
            ("vocabulary", "the widths, also of embeddings and head"),
            ("smooth", "widths of codes in groups, whose activations share no scale"),
        ):
            if name in self.model_fields_set:
                raise SettingError(f"bits chooses {why}; remove {name}", code="settings-conflict")
        if AUTO in self.skip:
            raise SettingError(
                "bits and skip: auto both choose by damage; remove one", code="settings-conflict"
            )
        if not self.damage_rows:
            raise SettingError(
                "bits chooses by the damage of each layer; damage_rows must be 1 or more", code="too-few-rows"
            )
        taken = {b: bits_per_weight(WIDTHS[b], self.options(WIDTHS[b].name)) for b in self.bits.widths}
        least, most = min(taken.values()), max(taken.values())
        if self.bits.budget is not None and not least <= self.bits.budget < most:
            raise SettingError(
                f"bits: budget {self.bits.budget:g}: with their scales the widths take {least:g} to {most:g}"
                " bits a weight; expected a number between",
                code="budget-out-of-range",
            )

    def _check_rows(self) -> None:
        """Refuse settings that need another one, or speak of rows that nobody looks at.

        Raises:
            ValueError: there is one.
        """
        given = self.model_fields_set
        counted = {"range": self.observes, "percentile": self.observes or self.clip == "percentile"}
        for name, means in counted.items():
            if name in given and not means:
                raise SettingError(f"{name} means nothing to {self._who}; remove it", code="unused-setting")
        if self.smooth is not None and not SCHEMES[self.scheme].one_scale:
            raise SettingError(
                f"smooth is for schemes whose activations share one scale ({_SMOOTHED}), and"
                f" {self.scheme} is none; remove it",
                code="unused-setting",
            )
        for name, reads in (("rows", self.reads_rows), ("damage_rows", self._measures)):
            if name in given and not reads:
                raise SettingError(
                    f"{name}: scheme {self.scheme} is not calibrated on samples; remove it",
                    code="unused-setting",
                )
        if "percentile" in given and "percentile" not in (self.range, self.clip):
            raise SettingError(
                f"percentile means nothing with range: {self.range}; remove it", code="unused-setting"
            )
        if self.beside is not None and (self.scales_inputs or self.bits is not None):
            other = "bits" if self.bits is not None else f"method: {self.method}"
            raise SettingError(
                f"low_rank goes with one scheme, by nearest, gptq or hqq; remove {other}, or it",
                code="settings-conflict",
            )
        if "budget" in given and AUTO not in self.skip:
            raise SettingError("budget is for skip: auto; add that, or remove it", code="unused-setting")
        if AUTO in self.skip and not self.damage_rows:
            raise SettingError(
                "skip: auto chooses by the damage of each layer; damage_rows must be 1 or more",
                code="too-few-rows",
            )

    def _check_clip(self) -> None:
        """Refuse ends of ranges to cut off where there are none, or where another setting chooses them.

        Raises:
            ValueError: there is one.
        """
        if self.clip == "awq" and self.method != "awq":
            ways = "that method, or clip: mse or percentile" if self.makes_up else "both"
            raise SettingError(
                f"clip: awq is a part of method: awq, and the method is {self.method}; take {ways}",
                code="settings-conflict",
            )
        fitted = [name for name in self.schemes() if not SCHEMES[name].ranges]
        if self.clip in ("mse", "percentile") and fitted:
            raise SettingError(
                f"clip: {self.clip} cuts ranges off, and {fitted[0]} has none: its values are fitted to all"
                " weights of a group; remove clip",
                code="settings-conflict",
            )
        if self.clip != "none" and self.method == "hqq":
            raise SettingError(
                f"method: hqq searches the ranges itself; remove clip: {self.clip}", code="settings-conflict"
            )

    @property
    def observes(self) -> bool:
        """Whether a scheme needs the range of activations."""
        return any(SCHEMES[name].observes for name in self.schemes())

    @property
    def scales_inputs(self) -> bool:
        """Whether inputs that are large on rows get finer steps."""
        return self.method in SCALING

    @property
    def makes_up(self) -> bool:
        """Whether weights that are not rounded yet make up for those that are."""
        return self.method in ("gptq", "awq-gptq")

    @property
    def reads_rows(self) -> bool:
        """Whether rows of data are looked at."""
        return self.observes or self.method in _READING or self._measures or self.weighs

    @property
    def beside(self) -> LowRank | None:
        """What stands beside the codes, None for nothing."""
        return self.low_rank if self.low_rank is not None and self.low_rank.rank else None

    @property
    def weighs(self) -> bool:
        """Whether low-rank pairs are nearest in what rows tell."""
        return self.beside is not None and self.beside.error != "weights"

    @property
    def _measures(self) -> bool:
        return self.observes or self.smooth is not None or AUTO in self.skip or self.bits is not None

    @property
    def patterns(self) -> list[str]:
        """What `skip` says of names."""
        return [pattern for pattern in self.skip if pattern != AUTO]

    @property
    def table_scheme(self) -> str:
        """The scheme of embeddings and head."""
        return self.vocabulary or self._own_table_scheme

    @property
    def _own_table_scheme(self) -> str:
        return SCHEMES[self.scheme].vocabulary or self.scheme

    def schemes(self) -> tuple[str, ...]:
        """Return the schemes that are used, the one of the linear layers first."""
        if self.bits is not None:
            return tuple(WIDTHS[width].name for width in self.bits.widths)
        tables = [self.table_scheme] if self.embeddings or self.head else []
        return tuple(dict.fromkeys((self.scheme, *tables)))

    def meant(self) -> dict[str, Any]:
        """Return what a report says: options as the schemes take them, without those that nothing uses.

        It may be said in a recipe, and gives the same codes under the same key.
        """
        dumped = self.model_dump(mode="json") | taken_by(self.schemes(), self)
        if self.bits is None:
            dumped["vocabulary"] = self.table_scheme
        idle = {name for name, means in self._uses().items() if not means}
        idle |= unused_by(self.schemes(), self)
        return {name: value for name, value in dumped.items() if name not in idle}

    def _uses(self) -> dict[str, bool]:
        """Return of settings that some others leave without a meaning whether they have one."""
        ends = "percentile" in (self.range if self.observes else "", self.clip)
        return {
            "scheme": self.bits is None, "vocabulary": self.bits is None and (self.embeddings or self.head),
            "range": self.observes, "percentile": ends, "rows": self.reads_rows,
            "damage_rows": self._measures, "budget": AUTO in self.skip, "smooth": self.smooth is not None,
        }  # fmt: skip

    def packages(self) -> dict[str, str]:
        """Return what the schemes need."""
        found: dict[str, str] = {}
        for name in self.schemes():
            found |= SCHEMES[name].packages
        return found

    def options(self, scheme: str) -> dict[str, Value]:
        """Return what `scheme` wants to know, as a quantized layer takes it."""
        return options_for(scheme, self)
