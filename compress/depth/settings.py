"""The settings of `depth`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from smelt.core.stage import Settings, StoredDtype

Layers = int | list[int]


class DepthSettings(Settings):
    """Settings of `depth`. A stack is given by `keep`, or by its own word: a number or a list."""

    keep: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="fraction of each stack's layers that stays; 0.5 if nothing is said",
    )
    encoder_layers: Layers | None = Field(
        default=None, description="encoder of an encoder-decoder: how many stay, or which, counted from 0"
    )
    decoder_layers: Layers | None = Field(default=None, description="decoder of an encoder-decoder: the same")
    layers: Layers | None = Field(default=None, description="models of one stack: the same")
    importance: Literal["loss", "block-influence", "alternate", "first", "last", "random"] = Field(
        default="loss",
        description="which stay. loss: one after another goes without which the loss is smallest;"
        " block-influence: those that change their states most; alternate: evenly spread, as distill's"
        " choose: spread",
    )
    rows: int = Field(default=128, ge=1, description="rows that block-influence and loss look at")
    dtype: StoredDtype = "keep"

    @field_validator("encoder_layers", "decoder_layers", "layers")
    @classmethod
    def _positive(cls, value: Layers | None) -> Layers | None:
        if (isinstance(value, int) and value < 1) or value == []:
            raise ValueError("at least one layer of a stack stays")
        return value
