"""Decoding on ONNX Runtime's own CUDA provider over stub libraries: devices, and bytes that are copied."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from smelt.runtimes.device_operators import DeviceOperators
from tests.support.graphs import cuda_graphs
from tests.support.processes import cuda_rig, cuda_steps


def steps(dtype="fp16", **variables):
    cuda_rig.rig_environment()
    folder = cuda_graphs.cuda_graphs("marian")[dtype]
    return cuda_rig.run_in_rig({"folder": str(folder)}, cuda_steps.__name__, **variables)


def test_second_process_keeps_session_and_values_on_its_own_gpu():
    assert steps(STUB_GPUS="2", LOCAL_RANK="1")["device_ids"] == [1]
    assert steps()["device_ids"] == [0]


def test_reordered_beams_are_kept_on_the_device():
    """Only the indices are sent, for each cache; reordered shared tensors keep their shapes otherwise."""
    answer = steps()
    num_caches = len(answer["shapes"]) // 2
    assert answer["reorder"]["to host"] == answer["reorder_shared"]["to host"] == 0
    assert answer["reorder"]["to device"] == cuda_steps.ROWS * 8 * num_caches < answer["caches"]
    assert {shape[0] for shape in answer["shapes"]} >= {cuda_steps.ROWS // 2}


def test_bf16_caches_are_kept_in_bf16_and_reordered_on_the_device():
    answer, half = steps("bf16"), steps()
    assert answer["types"] == ["tensor(bfloat16)"]
    assert answer["caches"] == half["caches"]
    assert answer["reorder"]["to host"] == 0


def test_only_the_best_tokens_are_copied_to_the_host():
    """Three for each row: a logit, a token id and a log-probability; all logits of a step otherwise."""
    answer = steps()
    assert answer["top_shape"] == [cuda_steps.ROWS, cuda_steps.TOP]
    assert answer["top"]["to host"] == cuda_steps.ROWS * cuda_steps.TOP * (4 + 8 + 4)
    assert answer["step"]["to host"] == answer["logits"] > answer["top"]["to host"]


def write_language_model(folder):
    """Write a graph with a cache of one head and logits of the last tokens, of operators without shapes.

    The rig's kernels compute nothing, so a graph that computes a shape on the device cannot be run there.
    """
    kinds = {"input_ids": ["b", "s"], "attention_mask": ["b", "t"], "position_ids": ["b", "s"]}
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, shape) for n, shape in kinds.items()]
    cache = ["b", 1, "p", 4]
    inputs.append(helper.make_tensor_value_info("past_key_values.0.key", TensorProto.FLOAT, cache))
    inputs.append(helper.make_tensor_value_info("num_logits_to_keep", TensorProto.INT64, []))
    nodes = [
        helper.make_node("Gather", ["keys", "input_ids"], ["new"]),
        helper.make_node("Unsqueeze", ["new", "one"], ["new_keys"]),
        helper.make_node("Concat", ["past_key_values.0.key", "new_keys"], ["present.0.key"], axis=2),
        helper.make_node("Unsqueeze", ["num_logits_to_keep", "zero"], ["count"]),
        helper.make_node("Neg", ["count"], ["start"]),
        helper.make_node("Gather", ["table", "input_ids"], ["all_logits"]),
        helper.make_node("Slice", ["all_logits", "start", "end", "one"], ["logits"]),
    ]
    constants = {
        "keys": np.ones((90, 4), np.float32), "table": np.ones((90, 90), np.float32), "one": np.array([1]),
        "zero": np.array([0]), "end": np.array([2**31]), "num_logits_to_keep": np.array(0),
    }  # fmt: skip
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "n", 90]),
        helper.make_tensor_value_info("present.0.key", TensorProto.FLOAT, ["b", 1, "t", 4]),
    ]
    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "model.onnx")


def test_caches_of_prompts_are_kept_on_the_device(tmp_path):
    write_language_model(tmp_path)
    request = {"folder": str(tmp_path), "is_prompt": True}
    answer = cuda_rig.run_in_rig(request, cuda_steps.__name__)
    count = 8  # the graph computes the beginning of its slice on the device
    assert answer["part"]["to host"] == count
    assert answer["no_logits"][1] == 0
    assert answer["last"]["to host"] == answer["logits"] + count
    assert answer["places"] == ["cuda"]
    inputs = 3 * 8 * cuda_steps.ROWS * cuda_steps.LENGTH  # at most: the mask is not used
    assert answer["last"]["to device"] <= inputs < inputs + answer["caches"]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_gathered_rows_equal_numpy_rows(dtype):
    values = np.arange(24).reshape(4, 2, 3).astype(dtype)
    rows = np.array([3, 3, 0])
    selected = DeviceOperators("cpu", 0).gather(onnxruntime.OrtValue.ortvalue_from_numpy(values), rows)
    assert np.array_equal(selected.numpy(), values[rows])
