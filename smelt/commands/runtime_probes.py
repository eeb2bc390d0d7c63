"""Test each runtime with a small computation: torch, ONNX Runtime, OpenVINO, TensorRT."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from smelt.commands.check_result import CheckResult, check_runtime


def try_torch() -> Iterator[CheckResult]:
    """Test torch on the CPU, in bf16, and on a GPU."""
    import torch

    def product(device: str) -> str:
        ones = torch.ones(4, 4, device=device)
        if float((ones @ ones).sum()) != 64.0:
            raise RuntimeError("wrong result of a matrix multiplication")
        return ""

    yield check_runtime("torch cpu", lambda: product("cpu") + _thread_count_text(torch.get_num_threads()))
    yield check_runtime("torch cpu bf16", _test_bf16, "nothing to install; training uses fp32 instead")
    if torch.version.cuda is None and torch.version.hip is None:
        yield CheckResult(
            "runtimes",
            "torch cuda",
            False,
            f"this torch ({torch.__version__}) is built for the CPU only",
            "with an NVIDIA GPU: choose a CUDA build at https://pytorch.org/get-started/locally",
        )
    else:
        remedy = "check that nvidia-smi works; the driver must support torch's CUDA version"
        yield check_runtime("torch cuda", lambda: product("cuda") + torch.cuda.get_device_name(), remedy)


def _thread_count_text(number: int) -> str:
    return f"{number} thread{'' if number == 1 else 's'}"


def _test_bf16() -> str:
    from smelt.runtime.backends.device import bf16_speedup

    gain = bf16_speedup()
    if not gain:
        raise RuntimeError("a bf16 matrix multiplication crashes, whatever instructions are listed below")
    return f"bf16 matrix multiplications work; a layer trains {gain:.1f} times as fast as in fp32"


def try_onnxruntime() -> Iterator[CheckResult]:
    """Test ONNX Runtime for the targets of `onnx`."""
    import onnxruntime

    from smelt.inspect.machine import has_cuda

    onnxruntime.set_default_logger_severity(4)  # keeps errors of providers off the terminal
    model = _tiny_graph()
    for target, provider in TARGET_PROVIDERS.items():
        name = f"onnxruntime {target.removeprefix('ort-')}"
        remedy = _REMEDIES.get(provider, "")
        if provider not in onnxruntime.get_available_providers():
            yield CheckResult("runtimes", name, False, "not included in this build", remedy)
        elif provider == "CUDAExecutionProvider" and not has_cuda():
            yield CheckResult("runtimes", name, False, "no NVIDIA GPU with a working driver", remedy)
        else:
            yield check_runtime(name, lambda p=provider, t=target: _run_session(model, p, t), remedy)  # type: ignore[misc]


def try_providers() -> Iterator[CheckResult]:
    """Test TensorRT in ONNX Runtime."""
    from smelt.inspect.machine import has_cuda
    from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS, missing_package, missing_requirement

    for target in PROVIDERS:
        name = f"onnxruntime {target.removeprefix('ort-')}"
        if not has_cuda():
            mend = missing_package(target) or "everything else is installed"
            yield CheckResult("runtimes", name, False, "no NVIDIA GPU with a working driver", mend)
        elif (lack := missing_requirement(target)) is not None:
            yield CheckResult("runtimes", name, False, "cannot be loaded", lack)
        else:
            remedy = "see docs/reference/stages/tensorrt.md#tensorrt-in-onnx-runtime"
            yield check_runtime(name, partial(_build_tiny_engine, target), remedy)


def _build_tiny_engine(target: str) -> str:
    """Build and run an engine of the tiny graph with a TensorRT provider."""
    import tempfile

    import numpy as np

    from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS, onnxruntime_version
    from smelt.runtime.backends.ort_tensorrt.provider_options import ProviderOptions
    from smelt.runtime.backends.ort_tensorrt.provider_session import open_provider_session
    from smelt.runtime.backends.tensorrt_sidecar import graph_hash

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.onnx"
        path.write_bytes(_tiny_graph())
        session = open_provider_session(PROVIDERS[target], path, ProviderOptions(graph_hash(path), {}))
        (result,) = session.run(None, {"x": np.array([1.0, 2.0], dtype=np.float32)})
    if result.tolist() != [2.0, 4.0]:
        raise RuntimeError("wrong result of an addition")
    return f"{onnxruntime_version()}, for target {target}"


# Providers that the targets of `onnx` use; other providers of a build are not used.
TARGET_PROVIDERS = {"ort-cpu": "CPUExecutionProvider", "ort-cuda": "CUDAExecutionProvider"}
_REMEDIES = {"CUDAExecutionProvider": "with an NVIDIA GPU: pip install 'onnxruntime-gpu[cuda,cudnn]'"}


def _tiny_graph() -> bytes:
    """Return y = x + x as a serialized model."""
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "tiny", [x], [y])
    opset = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString())


def _run_session(model: bytes, provider: str, target: str) -> str:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=[provider])
    if provider not in session.get_providers():
        raise RuntimeError("its libraries (CUDA, cuDNN) cannot be loaded")
    (result,) = session.run(None, {"x": np.array([1.0, 2.0], dtype=np.float32)})
    if result.tolist() != [2.0, 4.0]:
        raise RuntimeError("wrong result of an addition")
    return f"onnxruntime {onnxruntime.__version__}, for target {target}"


def try_openvino() -> Iterator[CheckResult]:
    """Test OpenVINO on the CPU."""
    yield check_runtime("openvino", _run_openvino, "pip install 'openvino>=2026'")


def _run_openvino() -> str:
    import numpy as np

    from smelt.runtime.backends.openvino_module import (
        cpu_plugin_options,
        has_bf16,
        has_openvino,
        import_openvino,
        release_version,
    )

    if not has_openvino():
        raise ModuleNotFoundError(name="openvino")
    ov = import_openvino()
    core = ov.Core()
    model = core.compile_model(core.read_model(_tiny_graph()), "CPU", cpu_plugin_options("fp32", 1))
    result = model([np.array([1.0, 2.0], dtype=np.float32)])[0]
    if result.tolist() != [2.0, 4.0]:
        raise RuntimeError("wrong result of an addition")
    bf16 = "with bf16" if has_bf16() else "no bf16 on this CPU"
    return f"openvino {release_version(ov)}, for target openvino; {bf16}"


def try_engines() -> Iterator[CheckResult]:
    """Test the builder of TensorRT."""
    yield check_runtime("tensorrt", _create_builder, "with an NVIDIA GPU: pip install tensorrt")


def _create_builder() -> str:
    from smelt.inspect.machine import cuda_missing_reason
    from smelt.runtime.backends.tensorrt_module import find_tensorrt, import_tensorrt

    if find_tensorrt() is None:
        raise ModuleNotFoundError(name="tensorrt")
    trt = import_tensorrt()
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    if builder is None:
        raise RuntimeError(f"{trt.__name__} {trt.__version__} is installed, but found no usable GPU")
    runs = (
        ""
        if cuda_missing_reason() is None
        else "; engines cannot run on this machine: no CUDA GPU that torch can use"
    )
    return f"{trt.__name__} {trt.__version__}: the builder works{runs}"
