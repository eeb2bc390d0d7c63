"""One TensorRT engine and the calls that run it; buffers are torch tensors.

API: TensorRT 11 (https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api), signatures
compared with the bindings of 11.4. The order of the calls is the API's own: the profile once; then for
each run the inputs' shapes and addresses, `infer_shapes`, the outputs' addresses, `execute_async_v3`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smelt.core.errors import RunError
from smelt.runtime.backends.tensorrt_module import make_logger

DEVICE = "cuda"
_PROFILE = 0  # smelt builds one
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


class Engine:
    """One deserialized engine and its execution context, on one CUDA stream.

    stream: a `torch.cuda.Stream`; it must be torch's current stream during every call, so that torch
        reuses no memory that the engine still reads.

    Raises:
        RunError: TensorRT cannot read the plan (built by another version, or for another GPU), or a tensor
            of it has a type that torch has not.
    """

    def __init__(self, trt: Any, path: Path, stream: Any) -> None:
        self._path, self._stream = path, stream
        self._logger = make_logger(trt)
        self._runtime = trt.Runtime(self._logger)
        self.engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            raise RunError(
                f"{path}: TensorRT {trt.__version__} cannot read this engine; it was built by another version"
                f" or for another GPU. Build it here with --fresh. TensorRT said: {self._said()}"
            )
        self._context = self.engine.create_execution_context()
        if self._context is None:
            raise RunError(f"{path}: no execution context; the GPU's memory may be full. {self._said()}")
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        mode = trt.TensorIOMode.INPUT
        self.inputs = [n for n in names if self.engine.get_tensor_mode(n) == mode]
        self.outputs = [n for n in names if n not in self.inputs]
        self.types = {n: self._type(n) for n in names}
        # what decides shapes is read by TensorRT on the host
        host = trt.TensorLocation.HOST
        self._on_host = {n for n in names if self.engine.get_tensor_location(n) == host}
        if not self._context.set_optimization_profile_async(_PROFILE, stream.cuda_stream):
            raise RunError(f"{path}: the engine's profile cannot be chosen. {self._said()}")
        stream.synchronize()

    def _type(self, name: str) -> torch.dtype:
        word = self.engine.get_tensor_dtype(name).name
        if word not in _TYPES:
            raise RunError(
                f"{self._path}: '{name}' has the type {word}; known are {', '.join(_TYPES)}."
                " Export again with onnx: {target: tensorrt}."
            )
        return _TYPES[word]

    def longest(self, name: str, place: int) -> int:
        """Return the largest size that the profile allows for a dimension of an input."""
        shape = tuple(self.engine.get_tensor_shape(name))
        if shape[place] != -1:
            return int(shape[place])
        return int(self.engine.get_tensor_profile_shape(name, _PROFILE)[2][place])

    def __call__(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run once on the engine's stream; takes and gives CUDA tensors. The outputs are new tensors.

        Raises:
            RunError: an input is missing, a shape is outside of the profile, or the GPU failed.
        """
        held: list[Tensor] = []  # memory of the stream, reused only by work that comes later on it
        for name in self.inputs:
            if name not in feeds:
                known = ", ".join(feeds)
                raise RunError(f"{self._path.name}: the engine wants the input '{name}'; there are {known}.")
            tensor = feeds[name].to(self._place(name), self.types[name]).contiguous()
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise RunError(self._outside(name, tensor))
            self._bind(name, tensor, held)
        self._infer_shapes()
        outputs = {}
        for name in self.outputs:
            outputs[name] = torch.empty(
                self._shape_of(name), dtype=self.types[name], device=self._place(name)
            )
            self._bind(name, outputs[name], held)
        if not self._context.execute_async_v3(self._stream.cuda_stream):
            raise RunError(f"{self._path.name}: the engine failed. TensorRT said: {self._said()}")
        if not self._on_host.isdisjoint(self.outputs):
            self._stream.synchronize()  # the host would read them before they are written
        return outputs

    def _place(self, name: str) -> str:
        return "cpu" if name in self._on_host else DEVICE

    def _bind(self, name: str, tensor: Tensor, held: list[Tensor]) -> None:
        held.append(_addressable(tensor))
        if not self._context.set_tensor_address(name, held[-1].data_ptr()):
            raise RunError(
                f"{self._path.name}: TensorRT takes no memory for '{name}'. It said: {self._said()}"
            )

    def _infer_shapes(self) -> None:
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as error:
            raise RunError(
                f"{self._path.name}: the shapes of the outputs cannot be found: {error}. {self._said()}"
            ) from error
        if missing:
            raise RunError(f"{self._path.name}: shapes are unknown for {', '.join(missing)}. {self._said()}")

    def _shape_of(self, name: str) -> tuple[int, ...]:
        shape = tuple(int(n) for n in self._context.get_tensor_shape(name))
        if -1 in shape:
            raise RunError(
                f"{self._path.name}: the shape {shape} of '{name}' depends on the data; no graph that"
                " onnx: {target: tensorrt} exports has such an output."
            )
        return shape

    def _outside(self, name: str, tensor: Tensor) -> str:
        shape = tuple(self.engine.get_tensor_shape(name))
        built = f"{shape} only"
        if -1 in shape:
            least, _, most = (tuple(s) for s in self.engine.get_tensor_profile_shape(name, _PROFILE))
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
