"""Settings of quantization-aware training, for the stages that train."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from smelt.core.errors import SettingError
from smelt.stage import Settings


class QatSettings(Settings):
    """Quantization-aware training of a quantized model."""

    scales: Literal["dynamic", "lsq"] = Field(
        default="dynamic",
        description="dynamic: computed from the weights at each update; lsq: learned",
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

    def to_report(self) -> dict[str, Any]:
        """Return what a report shows: learning_rate only for learned scales."""
        report = super().to_report()
        if self.scales != "lsq":
            del report["learning_rate"]
        return report

    @model_validator(mode="after")
    def _check_learning_rate(self) -> Self:
        if "learning_rate" in self.model_fields_set and self.scales != "lsq":
            raise SettingError(
                "learning_rate has no effect without scales: lsq; set it, or remove learning_rate",
                code="unused-setting",
            )
        return self
