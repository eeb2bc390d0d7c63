"""Decompositions of convolution kernels: Tucker-2, CP, and rank estimation by VBMF."""
