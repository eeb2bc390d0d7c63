"""Parts shared by several schemes: groups of inputs, packing, integer matrix multiplication."""
