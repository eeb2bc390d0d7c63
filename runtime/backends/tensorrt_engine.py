"""One TensorRT engine and the calls that run it; buffers are torch tensors.

API: TensorRT 11 (https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api), signatures
compared with the bindings of 11.4. The order of the calls is the API's own: the profile, once or whenever
another one fits better; then for each run the inputs' shapes and addresses, `infer_shapes`, the outputs'
addresses, `execute_async_v3`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smelt.core.errors import RunError
from smelt.runtime.backends.tensorrt_module import make_logger
from smelt.runtime.backends.tensorrt_sidecar import check_sidecar, gpu_here, read_sidecar

DEVICE = "cuda"
_TYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class _Profile:
    """What one optimization profile takes: for each dynamic input its smallest and largest shape."""

    index: int
    limits: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

    @property
    def size(self) -> int:
        """How much it takes at most: elements of all inputs."""
        return sum(prod(most) for _, most in self.limits.values())

    def takes(self, feeds: dict[str, Tensor]) -> bool:
        """Say whether all inputs are inside."""
        for name, (least, most) in self.limits.items():
            shape = tuple(feeds[name].shape)
            if len(shape) != len(least) or not all(
                low <= n <= high for low, n, high in zip(least, shape, most, strict=True)
            ):
                return False
        return True


class Engine:
    """One deserialized engine and its execution context, on one CUDA stream.

    stream: a `torch.cuda.Stream`; it must be torch's current stream during every call, so that torch
        reuses no memory that the engine still reads.

    What stands beside the plan (`tensorrt_sidecar`) is compared with what is here before it is loaded.

    Raises:
        InputError: it was built by another version or for another GPU, or its copy is not whole.
        RunError: TensorRT cannot read the plan (built by another version, or for another GPU), or a tensor
            of it has a type that torch has not.
    """

    def __init__(self, trt: Any, path: Path, stream: Any) -> None:
        self._path, self._stream = path, stream
        self._logger = make_logger(trt)
        self._runtime = trt.Runtime(self._logger)
        said = read_sidecar(path)  # without one TensorRT itself judges
        if said is not None:
            check_sidecar(path, said, trt.__name__, trt.__version__, gpu_here())
        if said is not None and said.version_compatible:
            self._runtime.engine_host_code_allowed = True  # such a plan brings its own runtime along
        self.engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            raise RunError(
                f"{path}: TensorRT {trt.__version__} cannot read this engine; it was built by another version"
                f" or for another GPU. Build it here with --rebuild. TensorRT said: {self._said()}",
                code="unopened-engine",
            )
        if said is not None and said.weights == "stripped":
            self._take_weights(trt, path.with_name(said.graph))
        self._context = self.engine.create_execution_context()
        if self._context is None:
            raise RunError(
                f"{path}: no execution context; the GPU's memory may be full. {self._said()}",
                code="no-execution-context",
            )
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        mode = trt.TensorIOMode.INPUT
        self.inputs = [n for n in names if self.engine.get_tensor_mode(n) == mode]
        self.outputs = [n for n in names if n not in self.inputs]
        self.types = {n: self._type(n) for n in names}
        # what decides shapes is read by TensorRT on the host
        host = trt.TensorLocation.HOST
        self._on_host = {n for n in names if self.engine.get_tensor_location(n) == host}
        # the smallest first: of those that fit a call it is the fastest
        self._profiles = sorted(self._read_profiles(), key=lambda profile: profile.size)
        self._chosen = -1
        self._choose(self._profiles[-1])
        stream.synchronize()

    def _take_weights(self, trt: Any, graph: Path) -> None:
        """Give the engine the weights of its graph, without which it was built."""
        refitter = trt.Refitter(self.engine, self._logger)
        parser = trt.OnnxParserRefitter(refitter, self._logger)
        if not parser.refit_from_file(str(graph)) or not refitter.refit_cuda_engine():
            raise RunError(
                f"{self._path}: its weights cannot be taken from {graph.name}. {self._said()}",
                code="refit-failed",
            )

    def _read_profiles(self) -> list[_Profile]:
        """Return what each profile of the engine takes."""
        dynamic = [n for n in self.inputs if -1 in tuple(self.engine.get_tensor_shape(n))]
        found = []
        for at in range(max(1, self.engine.num_optimization_profiles)):
            shapes = {n: self.engine.get_tensor_profile_shape(n, at) for n in dynamic}
            limits = {n: (tuple(least), tuple(most)) for n, (least, _, most) in shapes.items()}
            found.append(_Profile(at, limits))
        return found

    def _choose(self, profile: _Profile) -> None:
        if profile.index == self._chosen:
            return
        if not self._context.set_optimization_profile_async(profile.index, self._stream.cuda_stream):
            raise RunError(
                f"{self._path}: the engine's profile cannot be chosen. {self._said()}",
                code="unusable-profile",
            )
        self._chosen = profile.index

    def _type(self, name: str) -> torch.dtype:
        word = self.engine.get_tensor_dtype(name).name
        if word not in _TYPES:
            raise RunError(
                f"{self._path}: '{name}' has the type {word}; known are {', '.join(_TYPES)}."
                " Export again with onnx: {target: tensorrt}.",
                code="unsupported-dtype",
            )
        return _TYPES[word]

    def longest(self, name: str, place: int) -> int:
        """Return the largest size that the profile allows for a dimension of an input."""
        shape = tuple(self.engine.get_tensor_shape(name))
        if shape[place] != -1:
            return int(shape[place])
        return self._profiles[-1].limits[name][1][place]

    def __call__(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run once on the engine's stream; takes and gives CUDA tensors. The outputs are new tensors.

        Raises:
            RunError: an input is missing, a shape is outside of the profile, or the GPU failed.
        """
        held: list[Tensor] = []  # memory of the stream, reused only by work that comes later on it
        if lacking := [name for name in self.inputs if name not in feeds]:
            known = ", ".join(feeds)
            raise RunError(
                f"{self._path.name}: the engine wants the input '{lacking[0]}'; there are {known}.",
                code="missing-input",
            )
        fitting = [profile for profile in self._profiles if profile.takes(feeds)]
        self._choose((fitting or self._profiles[-1:])[0])
        for name in self.inputs:
            tensor = feeds[name].to(self._place(name), self.types[name]).contiguous()
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise RunError(self._outside(name, tensor), code="engine-limit")
            self._bind(name, tensor, held)
        self._infer_shapes()
        outputs = {}
        for name in self.outputs:
            outputs[name] = torch.empty(
                self._shape_of(name), dtype=self.types[name], device=self._place(name)
            )
            self._bind(name, outputs[name], held)
        if not self._context.execute_async_v3(self._stream.cuda_stream):
            raise RunError(
                f"{self._path.name}: the engine failed. TensorRT said: {self._said()}", code="engine-failed"
            )
        if not self._on_host.isdisjoint(self.outputs):
            self._stream.synchronize()  # the host would read them before they are written
        return outputs

    def _place(self, name: str) -> str:
        return "cpu" if name in self._on_host else DEVICE

    def _bind(self, name: str, tensor: Tensor, held: list[Tensor]) -> None:
        held.append(_addressable(tensor))
        if not self._context.set_tensor_address(name, held[-1].data_ptr()):
            raise RunError(
                f"{self._path.name}: TensorRT takes no memory for '{name}'. It said: {self._said()}",
                code="unbound-tensor",
            )

    def _infer_shapes(self) -> None:
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as error:
            raise RunError(
                f"{self._path.name}: the shapes of the outputs cannot be found: {error}. {self._said()}",
                code="shape-inference-failed",
            ) from error
        if missing:
            raise RunError(
                f"{self._path.name}: shapes are unknown for {', '.join(missing)}. {self._said()}",
                code="unknown-output-shape",
            )

    def _shape_of(self, name: str) -> tuple[int, ...]:
        shape = tuple(int(n) for n in self._context.get_tensor_shape(name))
        if -1 in shape:
            raise RunError(
                f"{self._path.name}: the shape {shape} of '{name}' depends on the data; no graph that"
                " onnx: {target: tensorrt} exports has such an output.",
                code="data-dependent-shape",
            )
        return shape

    def _outside(self, name: str, tensor: Tensor) -> str:
        shape = tuple(self.engine.get_tensor_shape(name))
        built = f"{shape} only"
        if -1 in shape:
            least, most = self._profiles[-1].limits[name]
            built = f"{least} to {most}"
        return (
            f"{self._path.name}: input '{name}' has the shape {tuple(tensor.shape)}; the engine was built for"
            f" {built}. Build it with other tensorrt: {{max_batch_size, lengths, max_new_tokens}}."
        )

    def _said(self) -> str:
        return " / ".join(self._logger.errors[-3:]) or "nothing"


def _addressable(tensor: Tensor) -> Tensor:
    """Return `tensor`, or for an empty one something with an address, which TensorRT insists on."""
    return tensor if tensor.numel() else torch.empty(1, dtype=tensor.dtype, device=tensor.device)
