"""What a recipe may say of the measuring at export time."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from smelt.core.stage import Settings

Threads: TypeAlias = int | Literal["tune"] | None


class Tune(Settings):
    """For which use the choices are made."""

    batch_size: int = Field(default=1, ge=1, le=4096, description="texts per call")
