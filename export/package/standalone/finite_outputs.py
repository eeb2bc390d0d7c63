"""Check that outputs are finite."""

from __future__ import annotations

from typing import Any

import numpy as np


def finite_outputs(outputs: Any) -> Any:
    """Return the model's `outputs` if all are finite; the argmax of NaN would be class 0."""
    if not np.isfinite(outputs).all():
        raise FloatingPointError("the model's outputs are NaN or infinite: a weight file may be damaged.")
    return outputs
