"""Graphs for ort-cuda on ONNX Runtime's own CUDA provider: which open, what runs where, what is copied.

The provider runs over stub libraries (tests/support/processes/cuda_rig.py), so nothing is computed.
"""

import pytest

from smelt.export.cuda_kernels import BF16_KERNELS, OLDER_KERNELS
from tests.support.graphs import cuda_graphs, graph_exports
from tests.support.models import every_family
from tests.support.pairs import matrix
from tests.support.processes import cuda_rig

FAMILIES = [
    family
    for family in graph_exports.FAMILIES
    if matrix.is_full_matrix() or family in (*every_family.DISTINCT_FAMILIES, "embedder", "vit", "resnet")
]
COUNTED = {
    "bert": "model", "marian": "decoder_with_past_model", "vit": "model",
    "llama": "model", "gpt2": "model", "t5": "decoder_with_past_model",
}  # fmt: skip

# nodes, nodes that copy between host and device, nodes on the CPU (shapes)
EXPECTED_COUNTS = {
    "bert": {"fp32": (36, 0, 0), "fp16": (37, 0, 0), "bf16": (37, 0, 0)},
    "marian": {"fp32": (46, 1, 2), "fp16": (47, 1, 2), "bf16": (47, 1, 2)},
    # its provider has no Pad in bf16
    "vit": {"fp32": (34, 0, 0), "fp16": (36, 0, 0), "bf16": (38, 0, 0)},
    "llama": {"fp32": (52, 4, 5), "fp16": (53, 4, 5), "bf16": (53, 4, 5)},
    "gpt2": {"fp32": (67, 4, 6), "fp16": (68, 4, 6), "bf16": (68, 4, 6)},
    "t5": {"fp32": (56, 0, 2), "fp16": (57, 0, 2), "bf16": (57, 0, 2)},
}


def test_tables_equal_kernels_of_provider():
    expected = {"bf16": BF16_KERNELS, "older": OLDER_KERNELS}
    assert cuda_rig.run_in_rig([{"kernels": True}])[0] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_open_in_every_dtype(family):
    cuda_rig.rig_environment()
    paths = [path for folder in cuda_graphs.cuda_graphs(family).values() for path in folder.glob("*.onnx")]
    opened = cuda_rig.open_graphs(paths)
    errors = {str(path): graph.error for path, graph in zip(paths, opened, strict=True) if graph.error}
    assert errors == {}
    assert len(paths) >= len(cuda_graphs.DTYPES)


# with caches of a fixed length: heads are an axis of their inputs, so more shapes are computed
FIXED_COUNTS = {
    "llama": {"fp32": (61, 4, 5), "fp16": (62, 4, 5), "bf16": (62, 4, 5)},
    "qwen2": {"fp32": (88, 4, 5), "fp16": (89, 4, 5), "bf16": (89, 4, 5)},
    "gpt2": {"fp32": (85, 4, 5), "fp16": (86, 4, 5), "bf16": (86, 4, 5)},
}


@pytest.mark.parametrize("family", FIXED_COUNTS)
def test_graphs_with_fixed_caches_run_their_operators_on_the_gpu(family):
    """TensorScatter for each cache and one attention a layer; only shapes are computed on the CPU."""
    cuda_rig.rig_environment()
    folders = cuda_graphs.cuda_graphs(family, 24)
    opened = cuda_rig.open_graphs(folder / "model.onnx" for folder in folders.values())
    assert [graph.error for graph in opened] == [None] * len(opened)
    counts = {
        dtype: (graph.nodes, graph.host_copies, sum(graph.on_cpu.values()))
        for dtype, graph in zip(folders, opened, strict=True)
    }
    assert counts == FIXED_COUNTS[family]
    for graph in opened:
        assert graph.operators["TensorScatter"] == 2 * graph.operators["Attention"] > 0
        assert not {"TensorScatter", "Attention", "RMSNormalization", "RotaryEmbedding"} & {*graph.on_cpu}


@pytest.mark.parametrize("family", COUNTED)
def test_nodes_and_host_copies_of_a_step_equal_recorded_counts(family):
    """A call launches a kernel for each node, and waits for each copy to the host."""
    cuda_rig.rig_environment()
    folders = cuda_graphs.cuda_graphs(family)
    opened = cuda_rig.open_graphs(folder / f"{COUNTED[family]}.onnx" for folder in folders.values())
    counts = {
        dtype: (graph.nodes, graph.host_copies, sum(graph.on_cpu.values()))
        for dtype, graph in zip(folders, opened, strict=True)
    }
    assert counts == EXPECTED_COUNTS[family]
