"""What `factorize` can be told: how the pairs are found, and how thin they are."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings, StoredDtype

Method = Literal["whitened-svd", "svd", "asvd", "fwsvd", "tucker", "cp"]
# Methods for convolutions; the others are for linear layers.
CONVOLUTIONS: frozenset[Method] = frozenset({"tucker", "cp"})
VBMF: Literal["vbmf"] = "vbmf"
# Methods that look at what layers are fed, or at the loss on rows with labels.
READ_ROWS: frozenset[Method] = frozenset({"whitened-svd", "asvd", "fwsvd"})
DEFAULT_ENERGY = 0.95
# What means nothing to a table of rows: it is fed no activations, and saves values, never time.
_OF_LAYERS = ("method", "budget", "alpha", "include", "exclude", "aim")


class Budget(Settings):
    """One budget over all layers that are chosen; it gives each of them its rank."""

    parameters: float = Field(
        gt=0, lt=1, description="fraction of the weights of the chosen layers that stays"
    )
    by: Literal["error", "damage"] = Field(
        default="damage",
        description="what is made smallest: what the layers do to the model's outputs (damage: each is"
        " measured alone), or the sum of their relative squared errors (error)",
    )


class FactorizeSettings(Settings):
    """Settings of `factorize`. At most one of energy, rank, ratio, budget; none means energy: 0.95."""

    what: Literal["layers", "embeddings"] = Field(
        default="layers",
        description="linear layers, or the word embedding, and the output layer where it is the same matrix",
    )
    by_frequency: bool | None = Field(
        default=None,
        description="of embeddings: a row counts as often as its token is met on rows; unless given, where"
        " there are any",
    )
    method: Method = Field(
        default="whitened-svd",
        description="what the error of a product is measured in: the outputs on rows (whitened-svd), the"
        " weights (svd), weights times mean inputs (asvd), weights times what the loss says (fwsvd);"
        " of convolutions, their kernels: tucker (1 x 1, D x D, 1 x 1), cp (1 x 1, D x 1, 1 x D, 1 x 1)",
    )
    energy: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="fraction of the sum of squared singular values that stays;"
        " 0.95 if rank, ratio and budget are not given either",
    )
    rank: Annotated[int, Field(ge=1)] | Literal["vbmf"] | None = Field(
        default=None,
        description="the same rank for every layer; vbmf: of convolutions, what is more than noise, layer by"
        " layer",
    )
    ratio: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="fraction of a layer's weights that stays; of a convolution's operations",
    )
    budget: Budget | None = Field(default=None, description="one for all layers: {parameters: 0.7}")
    alpha: float = Field(
        default=0.5, gt=0, le=1, description="of asvd: the power of an input's mean magnitude"
    )
    rows: int = Field(
        default=256,
        ge=1,
        description="rows to calibrate on (calibration, else train); for embeddings, whose tokens count,"
        " all unless it is given",
    )
    include: list[str] = Field(
        default=["*"], min_length=1, description="patterns of layer names, as in a shell"
    )
    exclude: list[str] = Field(
        default=["lm_head", "classifier", "classifier.*", "pre_classifier", "*.pooler.*"],
        description="patterns of names to leave alone",
    )
    aim: Literal["latency", "size"] = Field(
        default="latency",
        description="what must gain, or a layer stays whole: latency (in int8 on a CPU), size (weights)",
    )
    dtype: StoredDtype = "keep"

    @model_validator(mode="after")
    def _one(self) -> FactorizeSettings:
        given = [n for n in ("energy", "rank", "ratio", "budget") if getattr(self, n) is not None]
        if len(given) > 1:
            raise SettingError(
                f"give one of energy, rank, ratio and budget, not {' and '.join(given)}",
                code="settings-conflict",
            )
        if self.rank == VBMF and not self.of_convolutions:
            raise SettingError(
                "rank: vbmf is for convolutions, method: tucker or cp", code="settings-conflict"
            )
        if self.budget is not None and self.of_convolutions:
            raise SettingError(
                "budget is for linear layers; give convolutions an energy, a rank or a ratio",
                code="unused-setting",
            )
        return self

    @model_validator(mode="after")
    def _of_what(self) -> FactorizeSettings:
        if self.what == "layers" and self.by_frequency is not None:
            raise SettingError(
                "by_frequency is for what: embeddings, whose rows are tokens; remove it",
                code="unused-setting",
            )
        odd = sorted(self.model_fields_set.intersection(_OF_LAYERS)) if self.what == "embeddings" else []
        if odd:
            raise SettingError(
                f"{' and '.join(odd)}: of linear layers; embeddings take rank, ratio or energy; remove it, or"
                " give layers a factorize step of their own",
                code="unused-setting",
            )
        return self

    @model_serializer(mode="wrap")
    def _said(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Of layers as before there was anything else: keys of stored artifacts are made of it."""
        found: dict[str, Any] = written(self)
        unsaid = ("what", "by_frequency") if self.what == "layers" else _OF_LAYERS
        return {name: value for name, value in found.items() if name not in unsaid}

    @property
    def of_convolutions(self) -> bool:
        """Whether it is for convolutions, and not for linear layers."""
        return self.method in CONVOLUTIONS

    @property
    def reads_rows(self) -> bool:
        """Whether it cannot do without rows."""
        if self.what == "embeddings":
            return bool(self.by_frequency)
        return self.method in READ_ROWS or (self.budget is not None and self.budget.by == "damage")
