"""Errors that an export could make, put into a finished graph: each must be found by the comparison.

A mutation takes an onnx.ModelProto, changes it in place, and raises `Nothing` where it has nothing to change.
`ALL` holds them by name.
"""

from tests.support.graphs import layer_mutations, mask_mutations, position_mutations, quantization_mutations
from tests.support.graphs.graph_edits import MUTATIONS as ALL

__all__ = ["ALL", "layer_mutations", "mask_mutations", "position_mutations", "quantization_mutations"]
