"""What `share` can be told."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings, StoredDtype


class Difference(Settings):
    """What each layer of a group keeps of its own: a thin product, and its bias."""

    rank: int = Field(ge=1, description="of each difference, at most the smaller side of a layer")
    iterations: int = Field(
        default=1,
        ge=1,
        le=100,
        description="how often the differences, and what is shared beside them, are found in turn",
    )


class ShareSettings(Settings):
    """Settings of `share`. At most one of groups and every; none means every: 2."""

    what: list[Literal["attention", "ffn"]] = Field(
        default=["attention", "ffn"], min_length=1, description="products of attention, feed-forward products"
    )
    groups: int | None = Field(
        default=None,
        ge=1,
        description="so many groups of neighbouring layers in each stack, as equal as can be",
    )
    every: int | None = Field(default=None, ge=2, description="so many neighbouring layers make a group")
    keep_ends: bool = Field(
        default=False, description="the first and the last layer of each stack keep their own"
    )
    take: Literal["first", "mean", "last"] = Field(
        default="first", description="which weights a group gets: of one of its layers, or the mean of all"
    )
    stacks: list[Literal["layers", "encoder_layers", "decoder_layers"]] | None = Field(
        default=None, min_length=1, description="the stacks whose layers share; unless given, all"
    )
    difference: Difference | None = Field(
        default=None, description="what each layer keeps of its own: {rank: 16}; without it nothing"
    )
    dtype: StoredDtype = "keep"

    @model_serializer(mode="wrap")
    def _said(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without a difference as before there was one: keys of stored artifacts are made of it."""
        found: dict[str, Any] = written(self)
        return {name: value for name, value in found.items() if name != "difference" or value is not None}

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.groups is not None and self.every is not None:
            raise SettingError("give one of groups and every, not both", code="settings-conflict")
        return self
