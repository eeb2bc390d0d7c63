"""Operators with a bfloat16 kernel in ONNX Runtime's CUDA provider, and those without one in newer opsets.

The lists are not written by hand: `python -m tests.support.processes.cuda_rig --kernels` prints them, from
the kernels that the provider of onnxruntime-gpu 1.31 registers, and a test compares them. The provider does
not list its kernels where it cannot be loaded, and an export must not need a GPU.
"""

from __future__ import annotations

from typing import Any

from smelt.export.value_types import node_key
from smelt.runtimes.graph_walk import all_nodes, normalized_domain, opset_versions

_NEVER = 1 << 30
# by operator, of ONNX and of com.microsoft: the first opset with such a kernel
BF16_KERNELS = {
    "Abs": 13,
    "Add": 13,
    "Attention": 1,
    "AveragePool": 22,
    "BiasDropout": 1,
    "BiasGelu": 1,
    "BitmaskBiasDropout": 1,
    "BitmaskDropout": 1,
    "BranchwiseRMSNorm": 1,
    "Cast": 6,
    "CausalConvWithState": 1,
    "Compress": 9,
    "Concat": 4,
    "ConstantOfShape": 9,
    "Conv": 22,
    "Cos": 22,
    "DeformConv": 22,
    "Div": 13,
    "Dropout": 13,
    "DynamicSlice": 1,
    "DynamicSparseAttention": 1,
    "EngramGate": 1,
    "Erf": 13,
    "Exp": 13,
    "Expand": 8,
    "FastGelu": 1,
    "Flatten": 1,
    "FusedMatMul": 1,
    "GatedAdd": 1,
    "GatedDeltaNet": 1,
    "GatedRMSNorm": 1,
    "Gather": 1,
    "GatherBlockQuantized": 1,
    "GatherElements": 11,
    "GatherND": 13,
    "Gelu": 1,
    "Gemm": 13,
    "GemmFloat8": 1,
    "GroupQueryAttention": 1,
    "HardSigmoid": 22,
    "HardSwish": 22,
    "HyperConnectionPostMix": 1,
    "HyperConnectionPreMix": 1,
    "Identity": 1,
    "If": 1,
    "IsInf": 20,
    "IsNaN": 13,
    "LayerNormalization": 1,
    "LinearAttention": 1,
    "LinearAttentionGate": 1,
    "Loop": 1,
    "LpNormalization": 22,
    "MRotaryEmbedding": 1,
    "MatMul": 13,
    "MatMulBlockQuantizedFp4Weight": 1,
    "MatMulBlockQuantizedFp8Weight": 1,
    "MatMulBnb4": 1,
    "MatMulNBits": 1,
    "Max": 6,
    "MemcpyFromHost": 1,
    "MemcpyToHost": 1,
    "Min": 6,
    "MoE": 1,
    "Mod": 13,
    "Mul": 13,
    "MultiHeadAttention": 1,
    "Neg": 13,
    "PackedSparseAttentionIndexer": 1,
    "PagedAttention": 1,
    "Pow": 13,
    "QMoE": 1,
    "QuickGelu": 1,
    "RMSNormalization": 23,
    "RandomNormal": 22,
    "RandomNormalLike": 1,
    "RandomUniform": 22,
    "RandomUniformLike": 1,
    "ReduceMean": 1,
    "ReduceSum": 13,
    "Relu": 13,
    "Reshape": 1,
    "ReverseSequence": 10,
    "RoiAlign": 22,
    "RotaryEmbedding": 1,
    "ScaledSiLU": 1,
    "Scan": 8,
    "Scatter": 9,
    "ScatterElements": 11,
    "ScatterND": 11,
    "SequenceAt": 11,
    "SequenceConstruct": 11,
    "Shape": 1,
    "Sigmoid": 13,
    "Sign": 13,
    "SimplifiedLayerNormalization": 1,
    "Sin": 22,
    "Size": 1,
    "SkipLayerNormalization": 1,
    "SkipSimplifiedLayerNormalization": 1,
    "Slice": 1,
    "Softmax": 13,
    "Softplus": 22,
    "Softsign": 22,
    "SparseAttention": 1,
    "SparseAttentionIndexer": 1,
    "SparsePagedAttention": 1,
    "Split": 2,
    "Sqrt": 13,
    "Squeeze": 1,
    "Sub": 13,
    "Sum": 6,
    "Tanh": 13,
    "TensorScatter": 24,
    "Tile": 13,
    "TopK": 24,
    "Transpose": 1,
    "TransposeMatMul": 1,
    "Trilu": 1,
    "UnfoldTensor": 1,
    "Unsqueeze": 1,
    "VarlenCausalConvWithState": 1,
    "Where": 16,
}

# by operator: the first opset with a version of it that has no kernel, so that the CPU computes it
OLDER_KERNELS = {
    "Dropout": 22,
    "Elu": 22,
    "EyeLike": 22,
    "InstanceNormalization": 22,
    "MaxPool": 22,
    "Selu": 22,
    "ThresholdedRelu": 22,
}
# the modules of torch.nn that are exported as one of them
_OLDER_MODULES = (
    "ELU", "SELU", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
    "MaxPool1d", "MaxPool2d", "MaxPool3d",
)  # fmt: skip


def has_older_kernels(model: Any) -> bool:
    """Return whether a torch module has layers that CUDA has kernels for in opsets before 22 only."""
    from torch import nn

    kinds = tuple(getattr(nn, name) for name in _OLDER_MODULES)
    return any(isinstance(module, kinds) for module in model.modules())


def nodes_without_bf16_kernel(model: Any) -> set[str]:
    """Return the nodes of an onnx.ModelProto that CUDA cannot compute in bfloat16, by their first output."""
    opsets = opset_versions(model)
    return {
        node_key(node)
        for node in all_nodes(model.graph.node)
        if not BF16_KERNELS.get(node.op_type, _NEVER) <= opsets[normalized_domain(node.domain)]
    }
