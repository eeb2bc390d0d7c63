"""The settings `learned_masks` of `finetune` and `distill`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings


class LearnedMasksSettings(Settings):
    """Masks that are learned under a parameter budget; masked units are removed after training."""

    targets: tuple[Literal["heads", "ffn", "width"], ...] = Field(
        default=("heads", "ffn"),
        description="units with masks; width: channels of the hidden states; [] if only parts have masks",
    )
    parts: tuple[Literal["attention", "cross-attention", "ffn"], ...] = Field(
        default=(),
        description="parts of layers with masks, as in `drop-layers`",
    )
    keep_ratio: float = Field(
        default=0.5, gt=0, lt=1, description="kept fraction of the parameters with masks"
    )
    warmup: float = Field(
        default=0.4,
        gt=0,
        le=1,
        description="fraction of the updates until the kept fraction falls to keep_ratio",
    )
    learning_rate: float = Field(default=0.1, gt=0, description="peak learning rate of masks and multipliers")
    multiple_of: int = Field(default=8, ge=1, description="kept neurons or channels are a multiple of this")

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.targets or self.parts):
            raise SettingError(
                "targets and parts are both empty, so there is nothing to mask; set targets, such as"
                " [heads, ffn]",
                code="missing-setting",
            )
        return self
