"""What a recipe may say of the measuring at export time."""

from __future__ import annotations

from pydantic import Field

from smelt.core.stage import Settings


class Tune(Settings):
    """For which use the choices are made."""

    batch_size: int = Field(default=1, ge=1, le=4096, description="texts per call")
    beams: int = Field(default=1, ge=1, le=64, description="of the search: rows of a step for each text")
