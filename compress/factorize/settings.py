"""The settings of `factorize`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.stage import Settings, StoredDtype

FactorizeMethod = Literal["whitened-svd", "svd", "asvd", "fwsvd", "tucker", "cp"]
# Methods for convolutions; the others are for linear layers.
CONVOLUTION_METHODS: frozenset[FactorizeMethod] = frozenset({"tucker", "cp"})
VBMF: Literal["vbmf"] = "vbmf"
# Methods that use the inputs of layers, or gradients of the loss on labeled samples.
CALIBRATED_METHODS: frozenset[FactorizeMethod] = frozenset({"whitened-svd", "asvd", "fwsvd"})
DEFAULT_ENERGY = 0.95
# Settings without effect on an embedding: it has no input activations, and a factorization saves no time.
_LAYER_SETTINGS = (
    "method",
    "parameter_budget",
    "objective",
    "asvd_alpha",
    "include",
    "exclude",
    "optimize_for",
)


class FactorizeSettings(Settings):
    """Settings of `factorize`: at most one of energy (default 0.95), rank, keep_ratio, parameter_budget."""

    targets: list[Literal["layers", "embeddings"]] = Field(
        default=["layers"],
        min_length=1,
        description="linear layers and convolutions, or the token embedding: one per step",
    )
    frequency_weighted: bool | None = Field(
        default=None,
        description="embeddings: weight rows by token frequency; default: true if there are samples",
    )
    method: FactorizeMethod = Field(
        default="whitened-svd",
        description="which error is minimized; tucker and cp are for convolutions",
    )
    energy: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="kept fraction of the sum of squared singular values; default 0.95 if no other size is"
        " set",
    )
    rank: Annotated[int, Field(ge=1)] | Literal["vbmf"] | None = Field(
        default=None,
        description="rank of every layer; vbmf: estimated for each convolution",
    )
    keep_ratio: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="kept fraction of each layer's parameters; for convolutions, of its multiply-adds",
    )
    parameter_budget: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="kept fraction of the total parameters of these layers, distributed by objective",
    )
    objective: Literal["error", "sensitivity"] = Field(
        default="sensitivity",
        description="for parameter_budget; error: relative squared errors; sensitivity: weighted by"
        " their effect on the outputs",
    )
    asvd_alpha: float = Field(
        default=0.5, gt=0, le=1, description="asvd: exponent of the inputs' mean magnitude"
    )
    calibration_samples: int | None = Field(
        default=None,
        ge=1,
        description="samples from calibration data, else train; default: ten tokens per input of the"
        " widest layer; embeddings: all; fwsvd: 256",
    )
    include: list[str] = Field(
        default=["*"], min_length=1, description="patterns of layer names, as in a shell"
    )
    exclude: list[str] = Field(
        default=["lm_head", "classifier", "classifier.*", "pre_classifier", "*.pooler.*"],
        description="patterns of layer names that are not factorized",
    )
    optimize_for: Literal["latency", "size"] = Field(
        default="latency",
        description="a layer is factorized only if this is expected to improve",
    )
    dtype: StoredDtype = "keep"

    @model_validator(mode="after")
    def _check_rank(self) -> FactorizeSettings:
        set_fields = [
            n for n in ("energy", "rank", "keep_ratio", "parameter_budget") if getattr(self, n) is not None
        ]
        if len(set_fields) > 1:
            raise SettingError(
                f"set only one of energy, rank, keep_ratio and parameter_budget; {' and '.join(set_fields)}"
                " are set",
                code="settings-conflict",
            )
        if self.rank == VBMF and not self.for_convolutions:
            raise SettingError(
                "rank: vbmf applies only to convolutions; set method: tucker or cp", code="settings-conflict"
            )
        if "objective" in self.model_fields_set and self.parameter_budget is None:
            raise SettingError(
                "objective has no effect without parameter_budget; remove it", code="unused-setting"
            )
        if self.parameter_budget is not None and self.for_convolutions:
            raise SettingError(
                "parameter_budget applies only to linear layers; for convolutions set energy, rank or"
                " keep_ratio",
                code="unused-setting",
            )
        return self

    @model_validator(mode="after")
    def _check_targets(self) -> FactorizeSettings:
        if {*self.targets} == {"layers", "embeddings"}:
            raise SettingError(
                "targets: layers and embeddings need different ranks. Write two steps, one for each",
                code="settings-conflict",
            )
        if not self.of_embeddings and self.frequency_weighted is not None:
            raise SettingError(
                "frequency_weighted has no effect without targets: [embeddings]; remove it",
                code="unused-setting",
            )
        unused = sorted(self.model_fields_set.intersection(_LAYER_SETTINGS)) if self.of_embeddings else []
        if unused:
            raise SettingError(
                f"{' and '.join(unused)}: applies only to linear layers; for embeddings set rank,"
                " keep_ratio or energy. Remove it, or factorize the layers in a separate step",
                code="unused-setting",
            )
        return self

    def to_report(self) -> dict[str, Any]:
        """Return the settings for a report, without unused ones."""
        unused: set[str] = set()
        if self.of_embeddings:
            unused.update(_LAYER_SETTINGS)
        elif self.parameter_budget is None:
            unused.add("objective")
        return {name: value for name, value in super().to_report().items() if name not in unused}

    @property
    def of_embeddings(self) -> bool:
        """Whether the token embedding is factorized, instead of layers."""
        return "embeddings" in self.targets

    @property
    def for_convolutions(self) -> bool:
        """Whether the method factorizes convolutions."""
        return self.method in CONVOLUTION_METHODS

    @property
    def needs_calibration(self) -> bool:
        """Whether the method needs calibration samples."""
        if self.of_embeddings:
            return bool(self.frequency_weighted)
        return self.method in CALIBRATED_METHODS or (
            self.parameter_budget is not None and self.objective == "sensitivity"
        )
