"""What `factorize` can be told: how the pairs are found, and how thin they are."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from smelt.core.stage import Settings, StoredDtype

Method = Literal["whitened-svd", "svd", "asvd", "fwsvd"]
# Methods that look at what layers are fed, or at the loss on rows with labels.
READ_ROWS: frozenset[Method] = frozenset({"whitened-svd", "asvd", "fwsvd"})
DEFAULT_ENERGY = 0.95


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

    method: Method = Field(
        default="whitened-svd",
        description="what the error of a product is measured in: the outputs on rows (whitened-svd), the"
        " weights (svd), weights times mean inputs (asvd), weights times what the loss says (fwsvd)",
    )
    energy: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="fraction of the sum of squared singular values that stays;"
        " 0.95 if rank, ratio and budget are not given either",
    )
    rank: int | None = Field(default=None, ge=1, description="the same rank for every layer")
    ratio: float | None = Field(
        default=None, gt=0, lt=1, description="fraction of a layer's weights that stays"
    )
    budget: Budget | None = Field(default=None, description="one for all layers: {parameters: 0.7}")
    alpha: float = Field(
        default=0.5, gt=0, le=1, description="of asvd: the power of an input's mean magnitude"
    )
    rows: int = Field(default=256, ge=1, description="rows that are looked at (calibration, else train)")
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
            raise ValueError(f"give one of energy, rank, ratio and budget, not {' and '.join(given)}")
        return self

    @property
    def reads_rows(self) -> bool:
        """Whether the model is run over rows."""
        return self.method in READ_ROWS or (self.budget is not None and self.budget.by == "damage")
