"""A batch of images, as the inputs of a model.

Shapes: B = batch, h, w = height and width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PIXEL_VALUES = "pixel_values"


@dataclass(frozen=True)
class ImageBatch:
    """Images of one size. pixel_values: float32 [B, 3, h, w]."""

    pixel_values: NDArray[np.float32]

    @property
    def size(self) -> tuple[int, int]:
        """Return (h, w)."""
        return self.pixel_values.shape[2], self.pixel_values.shape[3]
