"""Attentions over int8 caches are held to numpy: what a wrong graph does differently is seen."""

import shutil

import numpy as np
import pytest
from onnx import numpy_helper

from smelt.core.errors import ParityError
from smelt.export.graph_files import read_graph, write_graph
from smelt.export.kv_cache import cached_attentions, check_int8_caches
from smelt.export.parity.references import TorchReference
from smelt.generation.prompt_batches import pad_left
from tests.support.graphs import exported_artifacts


@pytest.fixture
def asked(tmp_path):
    """Return a function: the comparison of a graph that `spoil` has changed."""
    model = read_graph(exported_artifacts.exported_artifact("int8-caches") / "model.onnx")
    tensors = {t.name: t for t in model.graph.initializer}
    nodes = list(cached_attentions(model))
    scales = {}
    for node, *outputs in nodes:
        for index, output in zip((12, 13), outputs, strict=True):
            scales[output] = numpy_helper.to_array(tensors[node.input[index]]).copy()
    random = np.random.default_rng(0)
    batch = pad_left([random.integers(1, 290, n) for n in (1, 4, 9)], 0)
    reference = TorchReference(
        batch, np.zeros(0), np.concatenate([batch.input_ids[:, -1:].T, random.integers(1, 290, (3, 3))])
    )

    def ask(spoil=None):
        if spoil is not None:
            spoil(model, [node for node, *_ in nodes], tensors)
            write_graph(model, tmp_path / "model.onnx")
        return check_int8_caches(tmp_path, "model", nodes, scales, reference)

    return ask


@pytest.mark.parametrize("outside", [False, True])
def test_correct_graph_equals_numpy_with_inline_or_external_weights(outside, asked, tmp_path):
    for name in ("model.onnx", "model.onnx_data"):
        shutil.copyfile(exported_artifacts.exported_artifact("int8-caches") / name, tmp_path / name)
    check_counts = asked(None if outside else lambda *_: None)
    assert (tmp_path / "model.onnx_data").is_file() is outside
    assert len(list(tmp_path.iterdir())) == 1 + outside
    # rows of 1 + 4 + 9 tokens and three steps of three rows; 2 layers, keys and values of 2 heads of 16
    assert check_counts["codes"] == (14 + 9) * 2 * 2 * 2 * 16
    assert check_counts["rounded_otherwise"] == 0
    assert check_counts["attention"] < 1e-5


def keys_scaled_as_values(model, nodes, tensors):
    nodes[0].input[12], nodes[0].input[13] = nodes[0].input[13], nodes[0].input[12]


def scales_of_another_layer(model, nodes, tensors):
    nodes[0].input[13], nodes[1].input[13] = nodes[1].input[13], nodes[0].input[13]


def one_scale_one_percent_larger(model, nodes, tensors):
    tensor = tensors[nodes[1].input[12]]
    values = numpy_helper.to_array(tensor).copy()
    values[1, 0, 3] *= 1.01
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


@pytest.mark.parametrize(("spoil", "codes", "output"), [
    (keys_scaled_as_values, {"cache-mismatch"}, ""),
    (scales_of_another_layer, {"cache-mismatch"}, "present.0.value"),
    (one_scale_one_percent_larger, {"rounding-mismatch", "cache-mismatch", "attention-mismatch"}, ""),
])  # fmt: skip
def test_wrong_scales_are_detected(spoil, codes, output, asked):
    with pytest.raises(ParityError, check=lambda error: error.code in codes) as excinfo:
        asked(spoil)
    assert output in str(excinfo.value)
