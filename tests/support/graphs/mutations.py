"""Mistakes that an export could make, put into a finished graph: each must be found by the comparison.

A mutation takes an onnx.ModelProto, changes it in place, and raises `Nothing` where it has nothing to change.
`ALL` holds them by name.
"""

import wrong_codes
import wrong_masks
import wrong_parts
import wrong_places
from graph_edits import MUTATIONS as ALL

__all__ = ["ALL", "wrong_codes", "wrong_masks", "wrong_parts", "wrong_places"]
