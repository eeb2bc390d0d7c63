"""The doctor lets each runtime compute something: torch, ONNX Runtime, OpenVINO, TensorRT."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from smelt.commands.finding import Finding, attempt


def try_torch() -> Iterator[Finding]:
    """Torch on the CPU, in bf16, on a GPU."""
    import torch

    def product(device: str) -> str:
        ones = torch.ones(4, 4, device=device)
        if float((ones @ ones).sum()) != 64.0:
            raise RuntimeError("a product of two matrices came out wrong")
        return ""

    yield attempt("torch cpu", lambda: product("cpu") + _threads(torch.get_num_threads()))
    yield attempt("torch cpu bf16", _bf16, "nothing to install; training takes fp32 by itself")
    if torch.version.cuda is None and torch.version.hip is None:
        yield Finding(
            "runtimes",
            "torch cuda",
            False,
            f"this torch ({torch.__version__}) is built for the CPU only",
            "with an NVIDIA GPU: choose a CUDA build at https://pytorch.org/get-started/locally",
        )
    else:
        remedy = "look whether nvidia-smi answers; the driver must be as new as torch's CUDA"
        yield attempt("torch cuda", lambda: product("cuda") + torch.cuda.get_device_name(), remedy)


def _threads(number: int) -> str:
    return f"{number} thread{'' if number == 1 else 's'}"


def _bf16() -> str:
    from smelt.runtime.backends.device import bf16_gain

    gain = bf16_gain()
    if not gain:
        raise RuntimeError("a bf16 product ends the process, whatever instructions are listed below")
    return f"bf16 products work; a layer trains {gain:.1f} times as fast as in fp32"


def try_onnxruntime() -> Iterator[Finding]:
    """ONNX Runtime, by the targets of `onnx`."""
    import onnxruntime

    from smelt.look.machine import has_cuda

    onnxruntime.set_default_logger_severity(4)  # failing providers write to the terminal otherwise
    model = _tiny_graph()
    for target, provider in PROVIDER_OF.items():
        name = f"onnxruntime {target.removeprefix('ort-')}"
        remedy = _REMEDIES.get(provider, "")
        if provider not in onnxruntime.get_available_providers():
            yield Finding("runtimes", name, False, "not in this build", remedy)
        elif provider == "CUDAExecutionProvider" and not has_cuda():
            yield Finding("runtimes", name, False, "no NVIDIA GPU with a working driver", remedy)
        else:
            yield attempt(name, lambda p=provider, t=target: _session(model, p, t), remedy)  # type: ignore[misc]


def try_providers() -> Iterator[Finding]:
    """TensorRT inside of ONNX Runtime."""
    from smelt.look.machine import has_cuda
    from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS, lack_of, lack_of_package

    for target in PROVIDERS:
        name = f"onnxruntime {target.removeprefix('ort-')}"
        if not has_cuda():
            mend = lack_of_package(target) or "with an NVIDIA GPU nothing else is missing"
            yield Finding("runtimes", name, False, "no NVIDIA GPU with a working driver", mend)
        elif (lack := lack_of(target)) is not None:
            yield Finding("runtimes", name, False, "cannot be loaded", lack)
        else:
            remedy = "see docs/reference/stages/tensorrt.md#tensorrt-in-onnx-runtime"
            yield attempt(name, partial(_engine, target), remedy)


def _engine(target: str) -> str:
    """Let a provider of TensorRT build an engine of the tiny graph and run it."""
    import tempfile

    import numpy as np

    from smelt.runtime.backends.ort_tensorrt.provider import PROVIDERS, onnxruntime_here
    from smelt.runtime.backends.ort_tensorrt.session import open_session
    from smelt.runtime.backends.ort_tensorrt.told import Told
    from smelt.runtime.backends.tensorrt_sidecar import hash_of_graph

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.onnx"
        path.write_bytes(_tiny_graph())
        session = open_session(PROVIDERS[target], path, Told(hash_of_graph(path), {}))
        (result,) = session.run(None, {"x": np.array([1.0, 2.0], dtype=np.float32)})
    if result.tolist() != [2.0, 4.0]:
        raise RuntimeError("a sum came out wrong")
    return f"{onnxruntime_here()}, for target {target}"


# What the targets of `onnx` run on; whatever else a build brings along, no target of smelt uses.
PROVIDER_OF = {"ort-cpu": "CPUExecutionProvider", "ort-cuda": "CUDAExecutionProvider"}
_REMEDIES = {"CUDAExecutionProvider": "with an NVIDIA GPU: pip install 'onnxruntime-gpu[cuda,cudnn]'"}


def _tiny_graph() -> bytes:
    """Return y = x + x as a serialized model."""
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "tiny", [x], [y])
    opset = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString())


def _session(model: bytes, provider: str, target: str) -> str:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=[provider])
    if provider not in session.get_providers():
        raise RuntimeError("its libraries (CUDA, cuDNN) cannot be loaded")
    (result,) = session.run(None, {"x": np.array([1.0, 2.0], dtype=np.float32)})
    if result.tolist() != [2.0, 4.0]:
        raise RuntimeError("a sum came out wrong")
    return f"onnxruntime {onnxruntime.__version__}, for target {target}"


def try_openvino() -> Iterator[Finding]:
    """OpenVINO on the CPU."""
    yield attempt("openvino", _compiled, "pip install 'openvino>=2026'")


def _compiled() -> str:
    import numpy as np

    from smelt.runtime.backends.openvino_module import (
        has_bf16,
        has_openvino,
        import_openvino,
        options_of,
        version_of,
    )

    if not has_openvino():
        raise ModuleNotFoundError(name="openvino")
    ov = import_openvino()
    core = ov.Core()
    model = core.compile_model(core.read_model(_tiny_graph()), "CPU", options_of("fp32", 1))
    result = model([np.array([1.0, 2.0], dtype=np.float32)])[0]
    if result.tolist() != [2.0, 4.0]:
        raise RuntimeError("a sum came out wrong")
    bf16 = "bf16 too" if has_bf16() else "no bf16 on this processor"
    return f"openvino {version_of(ov)}, for target openvino; {bf16}"


def try_engines() -> Iterator[Finding]:
    """The builder of TensorRT."""
    yield attempt("tensorrt", _tensorrt, "with an NVIDIA GPU: pip install tensorrt")


def _tensorrt() -> str:
    from smelt.look.machine import cuda_lacks
    from smelt.runtime.backends.tensorrt_module import find_tensorrt, import_tensorrt

    if find_tensorrt() is None:
        raise ModuleNotFoundError(name="tensorrt")
    trt = import_tensorrt()
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    if builder is None:
        raise RuntimeError(f"{trt.__name__} {trt.__version__} is installed, but finds no usable GPU")
    runs = "" if cuda_lacks() is None else "; engines cannot be run here: no CUDA GPU that torch can use"
    return f"{trt.__name__} {trt.__version__}: a builder can be made{runs}"
