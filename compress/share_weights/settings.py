"""The settings of `share-weights`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings, StoredDtype


class LowRankDelta(Settings):
    """A low-rank matrix that each layer of a group adds to the shared weights, and its bias."""

    rank: int = Field(ge=1, description="at most the smaller dimension of a layer")
    iterations: int = Field(
        default=1,
        ge=1,
        le=100,
        description="alternating updates of deltas and shared weights",
    )


class ShareWeightsSettings(Settings):
    """Settings of `share-weights`. Give at most one of groups and group_size; default group_size: 2."""

    targets: list[Literal["attention", "ffn"]] = Field(
        default=["attention", "ffn"],
        min_length=1,
        description="linear layers of attention, of the feed-forward part",
    )
    groups: int | None = Field(
        default=None,
        ge=1,
        description="groups of neighbouring layers per stack",
    )
    group_size: int | None = Field(default=None, ge=2, description="neighbouring layers in a group")
    exclude_first_and_last: bool = Field(
        default=False, description="the first and last layer of each stack keep their weights"
    )
    init_from: Literal["first", "mean", "last"] = Field(
        default="first",
        description="a group's initial weights: of one layer, or the mean",
    )
    stacks: list[Literal["layers", "encoder_layers", "decoder_layers"]] | None = Field(
        default=None, min_length=1, description="stacks whose layers are shared; default: all"
    )
    low_rank_delta: LowRankDelta | None = Field(
        default=None, description="a low-rank difference for each layer"
    )
    dtype: StoredDtype = "keep"

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.groups is not None and self.group_size is not None:
            raise SettingError("set either groups or group_size, not both", code="settings-conflict")
        return self
