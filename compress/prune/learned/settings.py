"""The settings of masks that are learned in a training: `masks` of `finetune` and `distill`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings


class MasksSettings(Settings):
    """What has masks that are learned under a budget while the weights train, and is then cut."""

    what: tuple[Literal["heads", "ffn", "width"], ...] = Field(
        default=("heads", "ffn"),
        description="attention heads, feed-forward neurons, channels of the hidden states (width); may be []"
        " beside parts",
    )
    parts: tuple[Literal["attention", "cross-attention", "ffn"], ...] = Field(
        default=(),
        description="whole parts of layers, as of depth: what; of each kind one stays in each stack",
    )
    keep: float = Field(
        default=0.5, gt=0, lt=1, description="fraction of the parameters of what has masks that is to stay"
    )
    warmup: float = Field(
        default=0.4, gt=0, le=1, description="part of the updates in which the budget falls from all to keep"
    )
    learning_rate: float = Field(
        default=0.1, gt=0, description="highest learning rate of masks and multipliers"
    )
    round_to: int = Field(
        default=8, ge=1, description="neurons, or channels, that stay are a multiple of this"
    )

    @model_serializer(mode="wrap")
    def _said(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without `parts` where there are none: keys of stored artifacts are made of it."""
        found: dict[str, Any] = written(self)
        return found if self.parts else {name: value for name, value in found.items() if name != "parts"}

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.what or self.parts):
            raise SettingError(
                "what and parts are empty, and nothing would have masks; name heads or ffn",
                code="missing-setting",
            )
        return self
