"""The settings of `drop-layers`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings, StoredDtype

LayerChoice = int | list[int]
_WHOLE_LAYERS: list[Any] = ["layers"]
# Importance that is measured on samples, or random; the others depend on a layer's position.
PART_IMPORTANCES = ("loss", "block-influence", "random")
# Warning if layers are dropped after a step that dropped parts of layers.
LAYERS_AFTER_PARTS_ERROR = (
    "'{step}' removes parts of layers by its own choice, and one part of each kind must be in the layers that"
    " are kept: otherwise this step keeps more layers, or stops; drop whole layers before '{step}'"
)


class DropLayersSettings(Settings):
    """Settings of `drop-layers`: keep_ratio for all stacks, or layers of each, a number or a list."""

    targets: list[Literal["layers", "attention", "cross-attention", "ffn"]] = Field(
        default=_WHOLE_LAYERS,
        min_length=1,
        description="whole layers, or parts of them",
    )
    keep_ratio: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="kept fraction of each stack; default 0.5",
    )
    encoder_layers: LayerChoice | None = Field(
        default=None, description="encoder-decoder: number of encoder layers to keep, or their indices from 0"
    )
    decoder_layers: LayerChoice | None = Field(default=None, description="likewise, decoder layers")
    layers: LayerChoice | None = Field(default=None, description="likewise, models of one stack")
    importance: Literal["loss", "block-influence", "uniform", "first", "last", "random"] = Field(
        default="loss",
        description="loss: remove one by one by the loss without it; block-influence: keep those that change"
        " hidden states most",
    )
    calibration_samples: int = Field(default=128, ge=1, description="for block-influence and loss")
    dtype: StoredDtype = "keep"

    @field_validator("encoder_layers", "decoder_layers", "layers")
    @classmethod
    def _positive(cls, value: LayerChoice | None) -> LayerChoice | None:
        if (isinstance(value, int) and value < 1) or value == []:
            raise SettingError("the number of layers to keep is 0; keep at least one", code="nothing-kept")
        return value

    @property
    def parts(self) -> tuple[str, ...]:
        """The kinds of parts that are removed, each once; none for whole layers."""
        return () if self.targets == _WHOLE_LAYERS else tuple(dict.fromkeys(self.targets))

    @model_validator(mode="after")
    def _parts_or_layers(self) -> Self:
        if self.parts and "layers" in self.parts:
            raise SettingError(
                "layers cannot be combined with other targets; use [layers] for whole layers, or only parts",
                code="settings-conflict",
            )
        if self.parts and self.importance not in PART_IMPORTANCES:
            raise SettingError(
                f"importance: {self.importance} applies only to whole layers; for parts use"
                f" {', '.join(PART_IMPORTANCES)}",
                code="wrong-importance",
            )
        return self
