"""Probes see every value, and a bound of what products and means add up."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from smelt.export.half_graphs import measure_ranges, split_batch
from smelt.export.parity.references import TorchReference
from smelt.generation.backend import Batch

IDS = np.array([[3, 1, 0], [2, 5, 4]])


def graph(folder):
    """Write ids -> float -> two products, whose sums cancel, and a mean of them."""
    value = helper.make_tensor_value_info
    weight = np.array([[100.0, 100.0], [-100.0, -100.0]], np.float32)
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["x"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["x", "last"], ["column"]),
        helper.make_node("Concat", ["column", "column"], ["pair"], axis=-1),
        helper.make_node("MatMul", ["pair", "weight"], ["y"]),
        helper.make_node("ReduceMean", ["pair", "last"], ["mean"], keepdims=0),
        helper.make_node("Identity", ["y"], ["logits"]),
    ]
    constants = {"weight": weight, "last": np.array([-1])}
    inner_graph = helper.make_graph(
        nodes, "g", [value("input_ids", 7, ["batch", "length"])],
        [value("logits", 1, ["batch", "length", 2]), value("mean", 1, ["batch", "length"])],
        [numpy_helper.from_array(v, n) for n, v in constants.items()],
    )  # fmt: skip
    model = helper.make_model(inner_graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "model.onnx")


def test_ranges_cover_all_samples_and_canceling_sums(tmp_path):
    graph(tmp_path)
    references = [
        TorchReference(Batch(ids[None], np.ones_like(ids[None])), np.zeros(1, np.float32)) for ids in IDS
    ]
    measured = measure_ranges(tmp_path, "model", references, 1)
    assert measured.values == {
        "weight": 100.0, "x": 5.0, "column": 5.0, "pair": 5.0, "y": 0.0, "mean": 5.0, "logits": 0.0
    }  # fmt: skip
    assert measured.sums == {"y": 1000.0, "mean": 10.0}
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_nan_values_count_as_infinite(tmp_path):
    graph(tmp_path)
    model = onnx.load(tmp_path / "model.onnx")
    weight = next(t for t in model.graph.initializer if t.name == "weight")
    weight.CopyFrom(numpy_helper.from_array(np.full((2, 2), np.inf, np.float32), "weight"))
    onnx.save(model, tmp_path / "model.onnx")
    ids = np.array([[0, 1]])
    reference = TorchReference(Batch(ids, np.ones_like(ids)), np.zeros(1, np.float32))
    measured = measure_ranges(tmp_path, "model", [reference], 1)
    assert measured.values["y"] == float("inf")  # 0 times infinity
    assert measured.values["x"] == 1.0


def test_batches_are_split_without_common_padding():
    lengths = np.array([1, 2, 2, 3, 6])
    mask = (np.arange(6) < lengths[:, None]).astype(np.int64)
    types = mask * 2
    batches = list(split_batch(Batch(mask * 7, mask, types)))
    assert [sub_batch.input_ids.shape for sub_batch in batches] == [(4, 3), (1, 6)]
    assert all((sub_batch.input_ids == sub_batch.attention_mask * 7).all() for sub_batch in batches)
    assert batches[1].token_type_ids is not None
    assert batches[1].token_type_ids.tolist() == [[2] * 6]
    left_padded = list(split_batch(Batch(mask[:, ::-1], mask[:, ::-1])))
    assert left_padded[0].input_ids.shape == (4, 3)
    assert left_padded[0].token_type_ids is None
