"""The form `triton`: a model repository for NVIDIA's Triton Inference Server."""
