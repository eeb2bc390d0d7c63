"""Outputs that are numbers."""

from __future__ import annotations

from typing import Any

import numpy as np


def numbers(outputs: Any) -> Any:
    """Return the model's `outputs` if all of them are numbers: the largest of NaN is class 0."""
    if not np.isfinite(outputs).all():
        raise FloatingPointError("the model's outputs are NaN or infinite: a weight of it is damaged.")
    return outputs
