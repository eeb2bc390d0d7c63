"""Mistakes that an export could make, put into a finished graph: each must be found by the comparison.

A mutation takes an onnx.ModelProto, changes it in place, and raises `Nothing` where it has nothing to change.
`ALL` holds them by name.
"""

import layer_mutations
import mask_mutations
import position_mutations
import quantization_mutations
from graph_edits import MUTATIONS as ALL

__all__ = ["ALL", "layer_mutations", "mask_mutations", "position_mutations", "quantization_mutations"]
