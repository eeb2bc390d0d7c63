"""Options of the quantization schemes as settings of `quantize`, and their help texts."""
