"""The setting `autotune` of `onnx`."""

from __future__ import annotations

from pydantic import Field

from smelt.core.stage import Settings


class AutotuneSettings(Settings):
    """The batch size and number of beams that operators are chosen for."""

    batch_size: int = Field(default=1, ge=1, le=4096, description="texts per call")
    num_beams: int = Field(default=1, ge=1, le=64, description="beams of the search")
