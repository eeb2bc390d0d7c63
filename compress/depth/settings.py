"""The settings of `depth`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings, StoredDtype

Layers = int | list[int]
_WHOLE: list[Any] = ["layers"]
# What says of a part how much it does; the others say where a layer stands.
OF_PARTS = ("loss", "block-influence", "random")
# What a plan says where whole layers go behind some that lost parts.
LAYERS_BEHIND_PARTS = (
    "'{step}' takes parts out of layers of its own choice, and of each kind one has to be in the layers that"
    " stay: else this step keeps more of them, or stops; take layers away before '{step}'"
)


class DepthSettings(Settings):
    """Settings of `depth`. A stack is given by `keep`, or by its own word: a number or a list."""

    what: list[Literal["layers", "attention", "cross-attention", "ffn"]] = Field(
        default=_WHOLE,
        min_length=1,
        description="layers: whole ones; else the parts of layers that go, of which all kinds named compete"
        " within a stack: attention (to the stack itself), cross-attention, ffn",
    )
    keep: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="fraction of each stack's layers (or parts) that stays; 0.5 if nothing is said",
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
        " choose: spread (of layers only, as first and last)",
    )
    rows: int = Field(default=128, ge=1, description="rows that block-influence and loss look at")
    dtype: StoredDtype = "keep"

    @field_validator("encoder_layers", "decoder_layers", "layers")
    @classmethod
    def _positive(cls, value: Layers | None) -> Layers | None:
        if (isinstance(value, int) and value < 1) or value == []:
            raise SettingError("at least one layer of a stack stays", code="nothing-kept")
        return value

    @property
    def parts(self) -> tuple[str, ...]:
        """The kinds of parts that go, each once; none where whole layers do."""
        return () if self.what == _WHOLE else tuple(dict.fromkeys(self.what))

    @model_validator(mode="after")
    def _parts_or_layers(self) -> Self:
        if self.parts and "layers" in self.parts:
            raise SettingError(
                "layers go whole or in parts: what is [layers], or names parts only", code="settings-conflict"
            )
        if self.parts and self.importance not in OF_PARTS:
            raise SettingError(
                f"importance: {self.importance} is of layers; for parts take {', '.join(OF_PARTS)}",
                code="wrong-importance",
            )
        return self

    @model_serializer(mode="wrap")
    def _said(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without `what` where it is layers: keys of stored artifacts are made of it."""
        found: dict[str, Any] = written(self)
        return found if self.parts else {name: value for name, value in found.items() if name != "what"}
