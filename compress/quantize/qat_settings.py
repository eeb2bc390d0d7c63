"""The settings `qat` of `finetune` and `distill`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings


class QatSettings(Settings):
    """Quantization-aware training of a quantized model."""

    scales: Literal["dynamic", "lsq"] = Field(
        default="dynamic",
        description="dynamic: computed from the weights at each update; lsq: learned",
    )
    activations: Literal["scheme", "one-bit"] = Field(
        default="scheme",
        description="scheme: as the scheme defines; one-bit: binary inputs of one-bit layers, for research",
    )
    learning_rate: float = Field(
        default=1e-2,
        gt=0,
        description="peak learning rate of learned scales",
    )
    weight_splitting: bool = Field(
        default=False,
        description="first split each ternary layer into two binary layers (BinaryBERT)",
    )
    save_master_weights: bool = Field(
        default=True,
        description="store float weights too, for further training",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        given = "learning_rate" in self.model_fields_set
        if given and self.scales != "lsq" and self.activations != "one-bit":
            raise SettingError(
                "learning_rate has no effect without scales: lsq or activations: one-bit; set one of"
                " these, or remove learning_rate",
                code="unused-setting",
            )
        return self
