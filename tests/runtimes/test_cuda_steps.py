"""Decoding on ONNX Runtime's own CUDA provider over stub libraries: devices, and bytes that are copied."""

from tests.support.graphs import cuda_graphs
from tests.support.processes import cuda_rig, cuda_steps


def steps(**variables):
    cuda_rig.rig_environment()
    folder = cuda_graphs.cuda_graphs("marian")["fp16"]
    return cuda_rig.run_in_rig({"folder": str(folder)}, cuda_steps.__name__, **variables)


def test_second_process_keeps_session_and_values_on_its_own_gpu():
    assert steps(STUB_GPUS="2", LOCAL_RANK="1")["device_ids"] == [1]
    assert steps()["device_ids"] == [0]
