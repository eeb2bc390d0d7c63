"""One TensorRT engine and its calls; buffers are torch tensors.

API: TensorRT 11 (https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api), signatures
compared with the bindings of 11.4. The order of the calls is the API's: the profile, once or when another
one fits better; then for each run the inputs' shapes and addresses, `infer_shapes`, the outputs'
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
from smelt.runtimes.tensorrt_module import make_logger
from smelt.runtimes.tensorrt_sidecar import check_sidecar, current_gpu, read_sidecar

CUDA_DEVICE = "cuda"
_TORCH_DTYPES = {
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
class _OptimizationProfile:
    """The limits of one optimization profile: for each dynamic input its smallest and largest shape."""

    index: int
    limits: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

    @property
    def size(self) -> int:
        """Return the largest number of elements of all inputs together."""
        return sum(prod(most) for _, most in self.limits.values())

    def accepts(self, feeds: dict[str, Tensor]) -> bool:
        """Return whether all inputs are within the limits."""
        for name, (least, most) in self.limits.items():
            shape = tuple(feeds[name].shape)
            if len(shape) != len(least) or not all(
                low <= n <= high for low, n, high in zip(least, shape, most, strict=True)
            ):
                return False
        return True


class TensorrtEngine:
    """One deserialized engine and its execution context, on one CUDA stream.

    stream: a `torch.cuda.Stream`; it must be torch's current stream during every call, so that torch
        reuses no memory that the engine still reads.

    The sidecar next to the plan (`tensorrt_sidecar`) is compared with this machine before loading.

    Raises:
        InputError: it was built by another version or for another GPU, or the file is incomplete.
        RunError: TensorRT cannot read the plan (built by another version, or for another GPU), or a tensor
            has a type that torch does not have.
    """

    def __init__(self, trt: Any, path: Path, stream: Any) -> None:
        self._path, self._stream = path, stream
        self._logger = make_logger(trt)
        self._runtime = trt.Runtime(self._logger)
        sidecar = read_sidecar(path)  # without one TensorRT itself checks
        if sidecar is not None:
            check_sidecar(path, sidecar, trt.__name__, trt.__version__, current_gpu())
        if sidecar is not None and sidecar.version_compatible:
            self._runtime.engine_host_code_allowed = True  # such a plan contains its own runtime
        self.engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            raise RunError(
                f"{path}: TensorRT {trt.__version__} cannot read this engine; it was built by another version"
                " or for another GPU. Build it here with --rebuild. TensorRT's errors:"
                f" {self._logged_errors()}",
                code="unopened-engine",
            )
        if sidecar is not None and sidecar.weights == "stripped":
            self._refit_weights(trt, path.with_name(sidecar.graph))
        self._context = self.engine.create_execution_context()
        if self._context is None:
            raise RunError(
                f"{path}: TensorRT could not create an execution context; the GPU may be out of"
                f" memory. {self._logged_errors()}",
                code="no-execution-context",
            )
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        mode = trt.TensorIOMode.INPUT
        self.inputs = [n for n in names if self.engine.get_tensor_mode(n) == mode]
        self.outputs = [n for n in names if n not in self.inputs]
        self.types = {n: self._tensor_dtype(n) for n in names}
        # shape tensors are read by TensorRT on the host
        host = trt.TensorLocation.HOST
        self._on_host = {n for n in names if self.engine.get_tensor_location(n) == host}
        # the smallest first: the smallest that fits a call is the fastest
        self._profiles = sorted(self._read_profiles(), key=lambda profile: profile.size)
        self._chosen = -1
        self._select_profile(self._profiles[-1])
        stream.synchronize()

    def _refit_weights(self, trt: Any, graph: Path) -> None:
        """Set the engine's weights from its graph; it was built without them."""
        refitter = trt.Refitter(self.engine, self._logger)
        parser = trt.OnnxParserRefitter(refitter, self._logger)
        if not parser.refit_from_file(str(graph)) or not refitter.refit_cuda_engine():
            raise RunError(
                f"{self._path}: the engine cannot be refitted with the weights of {graph.name}."
                f" {self._logged_errors()}",
                code="refit-failed",
            )

    def _read_profiles(self) -> list[_OptimizationProfile]:
        """Return the limits of each profile of the engine."""
        dynamic = [n for n in self.inputs if -1 in tuple(self.engine.get_tensor_shape(n))]
        found = []
        for at in range(max(1, self.engine.num_optimization_profiles)):
            shapes = {n: self.engine.get_tensor_profile_shape(n, at) for n in dynamic}
            limits = {n: (tuple(least), tuple(most)) for n, (least, _, most) in shapes.items()}
            found.append(_OptimizationProfile(at, limits))
        return found

    def _select_profile(self, profile: _OptimizationProfile) -> None:
        if profile.index == self._chosen:
            return
        if not self._context.set_optimization_profile_async(profile.index, self._stream.cuda_stream):
            raise RunError(
                f"{self._path}: the engine's profile cannot be set. {self._logged_errors()}",
                code="unusable-profile",
            )
        self._chosen = profile.index

    def _tensor_dtype(self, name: str) -> torch.dtype:
        word = self.engine.get_tensor_dtype(name).name
        if word not in _TORCH_DTYPES:
            raise RunError(
                f"{self._path}: '{name}' has the type {word}; supported: {', '.join(_TORCH_DTYPES)}. Export"
                " again with onnx: {target: tensorrt}.",
                code="unsupported-dtype",
            )
        return _TORCH_DTYPES[word]

    def max_dimension(self, name: str, place: int) -> int:
        """Return the largest size that the profile allows for a dimension of an input."""
        shape = tuple(self.engine.get_tensor_shape(name))
        if shape[place] != -1:
            return int(shape[place])
        return self._profiles[-1].limits[name][1][place]

    def __call__(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run once on the engine's stream; inputs and outputs are CUDA tensors. The outputs are new tensors.

        Raises:
            RunError: an input is missing, a shape is outside of the profile, or the GPU failed.
        """
        held: list[Tensor] = []  # memory of the stream, reused only by later work on it
        if lacking := [name for name in self.inputs if name not in feeds]:
            known = ", ".join(feeds)
            raise RunError(
                f"{self._path.name}: the engine needs the input '{lacking[0]}', got {known}.",
                code="missing-input",
            )
        fitting = [profile for profile in self._profiles if profile.accepts(feeds)]
        self._select_profile((fitting or self._profiles[-1:])[0])
        for name in self.inputs:
            tensor = feeds[name].to(self._tensor_device(name), self.types[name]).contiguous()
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise RunError(self._out_of_range_message(name, tensor), code="engine-limit")
            self._bind(name, tensor, held)
        self._infer_shapes()
        outputs = {}
        for name in self.outputs:
            outputs[name] = torch.empty(
                self._shape_of(name), dtype=self.types[name], device=self._tensor_device(name)
            )
            self._bind(name, outputs[name], held)
        if not self._context.execute_async_v3(self._stream.cuda_stream):
            raise RunError(
                f"{self._path.name}: the engine failed. TensorRT's errors: {self._logged_errors()}",
                code="engine-failed",
            )
        if not self._on_host.isdisjoint(self.outputs):
            self._stream.synchronize()  # the host would read them before they are written
        return outputs

    def _tensor_device(self, name: str) -> str:
        return "cpu" if name in self._on_host else CUDA_DEVICE

    def _bind(self, name: str, tensor: Tensor, held: list[Tensor]) -> None:
        held.append(_with_address(tensor))
        if not self._context.set_tensor_address(name, held[-1].data_ptr()):
            raise RunError(
                f"{self._path.name}: TensorRT did not accept the memory of '{name}'. TensorRT's"
                f" errors: {self._logged_errors()}",
                code="unbound-tensor",
            )

    def _infer_shapes(self) -> None:
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as error:
            raise RunError(
                f"{self._path.name}: the output shapes cannot be inferred: {error}. {self._logged_errors()}",
                code="shape-inference-failed",
            ) from error
        if missing:
            raise RunError(
                f"{self._path.name}: shapes are unknown for {', '.join(missing)}. {self._logged_errors()}",
                code="unknown-output-shape",
            )

    def _shape_of(self, name: str) -> tuple[int, ...]:
        shape = tuple(int(n) for n in self._context.get_tensor_shape(name))
        if -1 in shape:
            raise RunError(
                f"{self._path.name}: the shape {shape} of '{name}' depends on the data, which is not"
                f" supported. Export the graph with onnx: {{target: tensorrt}}.",
                code="data-dependent-shape",
            )
        return shape

    def _out_of_range_message(self, name: str, tensor: Tensor) -> str:
        shape = tuple(self.engine.get_tensor_shape(name))
        built = f"{shape} only"
        if -1 in shape:
            least, most = self._profiles[-1].limits[name]
            built = f"{least} to {most}"
        return (
            f"{self._path.name}: input '{name}' has shape {tuple(tensor.shape)}; the engine was built for"
            f" {built}. Rebuild it with larger tensorrt: {{max_batch_size, lengths, max_new_tokens}}."
        )

    def _logged_errors(self) -> str:
        return " / ".join(self._logger.errors[-3:]) or "nothing"


def _with_address(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a tensor with an address if it is empty, because TensorRT requires one."""
    return tensor if tensor.numel() else torch.empty(1, dtype=tensor.dtype, device=tensor.device)
