"""The settings of training through codes: `codes` of `finetune` and `distill`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from smelt.core.errors import SettingError
from smelt.core.stage import Settings


class CodesSettings(Settings):
    """How a quantized model trains through its codes."""

    scales: Literal["follow", "lsq"] = Field(
        default="follow",
        description="follow: each update finds scales anew from the weights; lsq: they are learned with the"
        " weights (learned step size), zero points and fixed ranges of activations as well",
    )
    activations: Literal["scheme", "one-bit"] = Field(
        default="scheme",
        description="scheme: layers are fed what their scheme says; one-bit: each input of a layer of one-bit"
        " codes becomes one of two values, {-a, a} or {0, a}, with a learned scale and learned shifts (BiT):"
        " it gains no speed on these runtimes, and costs quality",
    )
    learning_rate: float = Field(
        default=1e-2,
        gt=0,
        description="lsq: highest learning rate of the logarithms of scales; activations: one-bit: of scales"
        " and shifts, in parts of the first scale",
    )
    split: bool = Field(
        default=False,
        description="first make of each layer of three values two of one bit that add up to it (BinaryBERT)",
    )
    keep_weights: bool = Field(
        default=True,
        description="keep the float weights behind the codes beside the model, for the next training",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        given = "learning_rate" in self.model_fields_set
        if given and self.scales != "lsq" and self.activations != "one-bit":
            raise SettingError(
                "learning_rate is that of scales: lsq and activations: one-bit; give one, or leave it out",
                code="unused-setting",
            )
        return self

    @model_serializer(mode="wrap")
    def _said(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without `activations` where they are the scheme's: keys of stored artifacts are made of it."""
        found: dict[str, Any] = written(self)
        plain = self.activations == "scheme"
        return {name: value for name, value in found.items() if not (plain and name == "activations")}
