"""Decoding on ONNX Runtime's own CUDA provider over stub libraries: devices, and bytes that are copied."""

import numpy as np
import onnxruntime
import pytest

from smelt.runtimes.device_gather import DeviceGather
from tests.support.graphs import cuda_graphs
from tests.support.processes import cuda_rig, cuda_steps


def steps(**variables):
    cuda_rig.rig_environment()
    folder = cuda_graphs.cuda_graphs("marian")["fp16"]
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


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_gathered_rows_equal_numpy_rows(dtype):
    values = np.arange(24).reshape(4, 2, 3).astype(dtype)
    rows = np.array([3, 3, 0])
    selected = DeviceGather("cpu", 0)(onnxruntime.OrtValue.ortvalue_from_numpy(values), rows)
    assert np.array_equal(selected.numpy(), values[rows])
