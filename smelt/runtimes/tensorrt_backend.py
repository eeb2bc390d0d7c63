"""TensorRT backend: engines on an NVIDIA GPU, with the caches stored there; buffers are torch CUDA tensors.

More rows than an engine takes at once are run in parts, in sequence.

API: TensorRT 11 (https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api), signatures
compared with the bindings of 11.4. The order of an engine's calls is the API's: the profile, once or when
another one fits better; then for each run the inputs' shapes and addresses, `infer_shapes`, the outputs'
addresses, `execute_async_v3`.

Shapes: R = rows, S = input tokens of one call, P = tokens of previous calls, H = heads of a cache, d = width
of a head, V = vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smelt.core.errors import EngineWarning, InputError, RunError
from smelt.data.npz_arrays import NO_SAMPLE_AXES
from smelt.generation.backend import (
    PAST_PREFIX,
    PRESENT_PREFIX,
    Feeds,
    Logits,
    ModelGraphs,
    NoGenerationGraphs,
    Tokens,
    TopLogits,
    past_input_name,
    top_logits,
)
from smelt.generation.generating_runners import NUM_LOGITS_INPUT
from smelt.runtimes.device import TorchThreads
from smelt.runtimes.fixed_caches import WRITE_INDICES, cache_feeds, fixed_cache_length
from smelt.runtimes.graph_timer import timed_graph
from smelt.runtimes.onnx_import.signature import read_batch_axes
from smelt.runtimes.tensorrt_engine import (
    check_sidecar,
    current_gpu,
    import_tensorrt,
    make_logger,
    other_model_warning,
    read_sidecar,
)

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
        for name, (minimum, most) in self.limits.items():
            shape = tuple(feeds[name].shape)
            if len(shape) != len(minimum) or not all(
                low <= n <= high for low, n, high in zip(minimum, shape, most, strict=True)
            ):
                return False
        return True


class TensorrtEngine:
    """One deserialized engine and its execution context, on one CUDA stream.

    stream: a `torch.cuda.Stream`; it must be torch's current stream during every call, so that torch
        reuses no memory that the engine still reads.

    The sidecar next to the plan (`EngineSidecar`) is compared with this machine before loading.

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
            check_sidecar(path, sidecar, trt.__name__, trt.__version__, gpu := current_gpu())
            if message := other_model_warning(path, sidecar, gpu):
                warnings.warn(EngineWarning(message, code="other-gpu-model"), stacklevel=2)
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
        if sidecar is not None and sidecar.flags.get("weight_streaming"):
            # as many weights on the GPU as fit next to the activations
            self.engine.weight_streaming_budget_v2 = self.engine.get_weight_streaming_automatic_budget()
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
        self._bound_inputs: dict[str, tuple[int, torch.Size]] = {}
        # outputs that are the memory of an input, which TensorRT requires of caches with a fixed length
        self._written_inputs = {
            name: past_input_name(name)
            for name in (self.outputs if WRITE_INDICES in self.inputs else ())
            if name.startswith(PRESENT_PREFIX)
        }
        self._select_profile(self._profiles[-1])
        stream.synchronize()
        for text in dict.fromkeys(self._logger.warnings):
            message = f"{path.name}: TensorRT: {text}"
            warnings.warn(EngineWarning(message, code="tensorrt-warning"), stacklevel=2)

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
        dynamic_inputs = [n for n in self.inputs if -1 in tuple(self.engine.get_tensor_shape(n))]
        profiles = []
        for profile_index in range(max(1, self.engine.num_optimization_profiles)):
            shapes = {n: self.engine.get_tensor_profile_shape(n, profile_index) for n in dynamic_inputs}
            limits = {n: (tuple(minimum), tuple(most)) for n, (minimum, _, most) in shapes.items()}
            profiles.append(_OptimizationProfile(profile_index, limits))
        return profiles

    def _select_profile(self, profile: _OptimizationProfile) -> None:
        if profile.index == self._chosen:
            return
        if not self._context.set_optimization_profile_async(profile.index, self._stream.cuda_stream):
            raise RunError(
                f"{self._path}: the engine's profile cannot be set. {self._logged_errors()}",
                code="unusable-profile",
            )
        self._chosen = profile.index
        self._bound_inputs.clear()  # another profile needs all shapes again

    def _tensor_dtype(self, name: str) -> torch.dtype:
        dtype = self.engine.get_tensor_dtype(name).name
        if dtype not in _TORCH_DTYPES:
            raise RunError(
                f"{self._path}: '{name}' has the type {dtype}; supported: {', '.join(_TORCH_DTYPES)}. Export"
                " again with onnx: {target: tensorrt}.",
                code="unsupported-dtype",
            )
        return _TORCH_DTYPES[dtype]

    def max_dimension(self, name: str, axis: int) -> int:
        """Return the largest size that the profile allows for a dimension of an input."""
        shape = tuple(self.engine.get_tensor_shape(name))
        if shape[axis] != -1:
            return int(shape[axis])
        return self._profiles[-1].limits[name][1][axis]

    def __call__(self, feeds: dict[str, Tensor], buffers: CacheBuffers | None = None) -> dict[str, Tensor]:
        """Run once on the engine's stream; inputs and outputs are CUDA tensors.

        Args:
            feeds: the inputs by name; others are ignored.
            buffers: for the output caches. All other outputs are new tensors, except for caches of a fixed
                length, which are changed in place.

        Raises:
            RunError: an input is missing, a shape is outside of the profile, or the GPU failed.
        """
        live_tensors: list[Tensor] = []  # memory of the stream, reused only by later work on it
        inputs: dict[str, Tensor] = {}
        if missing := [name for name in self.inputs if name not in feeds]:
            feed_names = ", ".join(feeds)
            raise RunError(
                f"{self._path.name}: the engine needs the input '{missing[0]}', got {feed_names}.",
                code="missing-input",
            )
        accepting = [profile for profile in self._profiles if profile.accepts(feeds)]
        self._select_profile((accepting or self._profiles[-1:])[0])
        for name in self.inputs:
            tensor = feeds[name].to(self._tensor_device(name), self.types[name]).contiguous()
            live_tensors.append(tensor)
            inputs[name] = tensor
            memory = tensor.data_ptr(), tensor.shape
            if memory[0] and self._bound_inputs.get(name) == memory:
                continue  # as in the last run: what all steps of a text share
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise RunError(self._out_of_range_message(name, tensor), code="engine-limit")
            self._bind(name, tensor, live_tensors)
            self._bound_inputs[name] = memory
        self._infer_shapes()
        outputs = {}
        for name in self.outputs:
            shape, dtype = self._shape_of(name), self.types[name]
            if name in self._written_inputs:
                outputs[name] = inputs[self._written_inputs[name]]
            elif buffers is not None and name.startswith(PRESENT_PREFIX):
                outputs[name] = buffers.next(past_input_name(name), shape, dtype)
            else:
                outputs[name] = torch.empty(shape, dtype=dtype, device=self._tensor_device(name))
            self._bind(name, outputs[name], live_tensors)
        with timed_graph(lambda: self._stream):
            is_started = self._context.execute_async_v3(self._stream.cuda_stream)
        if not is_started:
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
            minimum, most = self._profiles[-1].limits[name]
            built = f"{minimum} to {most}"
        return (
            f"{self._path.name}: input '{name}' has shape {tuple(tensor.shape)}; the engine was built for"
            f" {built}. Rebuild it with larger tensorrt: {{max_batch_size, lengths, max_new_tokens}}."
        )

    def _logged_errors(self) -> str:
        return " / ".join(self._logger.errors[-3:]) or "nothing"


def _with_address(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a tensor with an address if it is empty, because TensorRT requires one."""
    return tensor if tensor.numel() else torch.empty(1, dtype=tensor.dtype, device=tensor.device)


_ROWS, _LENGTH = 0, 1  # axes of input_ids [R, S]
_PLACES = 2  # the axis of positions in a cache [R, H, P, d]
_REBUILD_HINT = "Run the tensorrt stage again to build it."


# A full buffer is replaced by one with room for this share of tokens more, one allocation for many steps
_MORE, _LEAST = 8, 16


class CacheBuffers:
    """Two buffers for each cache, in turns: a run reads one and writes the other.

    A step returns caches that are one token longer. Memory of a new size for each cache and step would be
    requested from the GPU again and again.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, list[Tensor]] = {}

    def next(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of the shape [R, H, P, d], other than that of the last call for `name`."""
        size, tokens = prod(shape), shape[_PLACES]
        spare, current = self._buffers.get(name, [torch.empty(0), torch.empty(0)])
        if spare.numel() < size or spare.dtype != dtype:
            room = max(_LEAST, tokens // _MORE) * (size // max(1, tokens))
            spare = torch.empty(size + room, dtype=dtype, device=CUDA_DEVICE)
        self._buffers[name] = [current, spare]
        return spare[:size].view(shape)


@dataclass
class EngineBatch:
    """At most as many rows of a batch as an engine takes, on the GPU.

    caches: input name -> tensor [R, H, P, d], outputs of the previous call. shared: input name -> tensor,
    the same in all calls, and for all beams of a sentence. buffers: of the caches.
    """

    rows: slice
    caches: dict[str, Tensor]
    shared: dict[str, Tensor]
    buffers: CacheBuffers = field(default_factory=CacheBuffers)


@dataclass
class TensorrtDecodeState:
    """The parts of a batch, in the order of their rows."""

    parts: list[EngineBatch]


class TensorrtBackend(NoGenerationGraphs):
    """A `Backend` over TensorRT engines."""

    name = "tensorrt"
    device = "cuda"

    prefers_stepwise = False
    reduces_logits = True

    def __init__(
        self,
        folder: Path,
        graphs: ModelGraphs,
        target: str | None,
        threads: int | None,
        device: str,
        dtype: str | None = None,
    ) -> None:
        trt = import_tensorrt()
        if not torch.cuda.is_available():
            raise InputError(
                "A TensorRT engine needs an NVIDIA GPU; torch finds none. `smelt doctor` shows why.",
                code="no-gpu",
            )
        self.version: str = trt.__version__
        self._folder, self._graphs = folder, graphs
        paths = [folder / f"{graph.name}.plan" for graph in graphs.call_order]
        if missing := [path for path in paths if not path.is_file()]:
            raise InputError(f"{missing[0]}: no such engine. {_REBUILD_HINT}", code="missing-engine")
        # all work and all memory on a separate stream; on the default stream TensorRT synchronizes more
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._engines = {path.stem: TensorrtEngine(trt, path, self._stream) for path in paths}
        first, main = self._engines[paths[0].stem], self._engines[graphs.main.name]
        self._past = [past_input_name(name) for name in main.outputs if name.startswith(PRESENT_PREFIX)]
        if graphs.uses_cache and not self._past:
            raise InputError(
                f"{paths[-1]}: this engine has no cache: it has no output {PRESENT_PREFIX}*. {_REBUILD_HINT}",
                code="no-cache",
            )
        has_tokens = "input_ids" in first.inputs  # a graph of arrays has other inputs
        self._axes = read_batch_axes(folder)
        with_rows = (name for name in first.inputs if self._axes.get(name, _ROWS) is not None)
        self._lead = "input_ids" if has_tokens else next(with_rows)
        self._most_rows = first.max_dimension(self._lead, self._axes.get(self._lead) or _ROWS)
        # each beam of a text is a row of the decoder
        self._most_decoder_rows = (
            main.max_dimension("input_ids", _ROWS) if graphs.uses_cache else self._most_rows
        )
        self.max_tokens_per_call: int | None = (
            first.max_dimension("input_ids", _LENGTH) if has_tokens else None
        )
        self._cache_length = fixed_cache_length(
            {name: tuple(main.engine.get_tensor_shape(name)) for name in main.inputs}
        )
        # a growing cache is followed by the token of the call
        self.max_total_tokens = self._cache_length
        if self._past and self._cache_length is None:
            self.max_total_tokens = main.max_dimension(self._past[0], _PLACES) + 1
        self._has_warned = False
        self._threads = TorchThreads(threads)  # last, so that an engine that does not load changes nothing

    def _engine(self, name: str) -> TensorrtEngine:
        if name not in self._engines:
            raise InputError(f"{self._folder}: this model is closed. Load it again.", code="closed-model")
        return self._engines[name]

    @torch.inference_mode()
    def call(self, graph: str, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Run an engine once; return all of its outputs by name, floats as float32."""
        engine = self._engine(graph)
        with torch.cuda.stream(self._stream):
            count = feeds[self._lead].shape[self._axes.get(self._lead) or _ROWS]
            slices = _split_rows(0, count, self._most_rows)
            parts = [engine(_to_gpu(feeds, row_slice, self._axes)) for row_slice in slices]
            return {
                name: _to_numpy([outputs[name] for outputs in parts], self._axes.get(name) or _ROWS)
                for name in engine.outputs
            }

    @torch.inference_mode()
    def start(
        self, rows: int, feeds: Feeds | None = None, shared: Feeds | None = None
    ) -> TensorrtDecodeState:
        """Run the engine before `main`, if there is one; start with empty caches."""
        with torch.cuda.stream(self._stream):
            return TensorrtDecodeState(
                [
                    self._start_batch(row_slice, feeds or {}, shared or {})
                    for row_slice in self._split_decoder_rows(rows)
                ]
            )

    def _split_decoder_rows(self, count: int) -> list[slice]:
        """Return the rows of each run of the decoder; warn once where they are several."""
        slices = _split_rows(0, count, self._most_decoder_rows)
        if len(slices) > 1 and not self._has_warned:
            self._has_warned = True
            message = (
                f"{self._folder}: {count} rows (texts x beams), but the decoder's engine takes"
                f" {self._most_decoder_rows} at once, so that each token takes {len(slices)} runs. Use"
                " smaller batches, or build it with larger tensorrt: {max_batch_size, num_beams}."
            )
            warnings.warn(EngineWarning(message, code="rows-split"), stacklevel=3)
        return slices

    def _start_batch(self, rows: slice, feeds: Feeds, shared: Feeds) -> EngineBatch:
        main = self._engine(self._graphs.main.name)
        gpu_inputs = _to_gpu(shared, rows)
        if self._graphs.encoder is not None:
            encoder = self._engine(self._graphs.encoder.name)
            parts = [
                encoder(_to_gpu(feeds, row_slice))
                for row_slice in _split_rows(rows.start, rows.stop, self._most_rows)
            ]
            gpu_inputs |= {
                past_input_name(name): _concat_batches([outputs[name] for outputs in parts])
                for name in encoder.outputs
                if name.startswith(PRESENT_PREFIX)
            }
        caches = {}
        for name in (name for name in main.inputs if name.startswith(PAST_PREFIX) and name not in gpu_inputs):
            _, heads, _, width = main.engine.get_tensor_shape(name)
            shape = (rows.stop - rows.start, heads, self._cache_length or 0, width)
            caches[name] = torch.zeros(shape, dtype=main.types[name], device=CUDA_DEVICE)
        return EngineBatch(rows, caches, gpu_inputs)

    @torch.inference_mode()
    def step(self, held: TensorrtDecodeState, feeds: Feeds, last: int = 1) -> Logits:
        """Run int64 [R, S]; return logits, [R, V] or [R, last, V]; the caches stay on the GPU."""
        with torch.cuda.stream(self._stream):
            return _to_numpy([self._advance(held, feeds, last)])

    @torch.inference_mode()
    def step_top(self, held: TensorrtDecodeState, feeds: Feeds, count: int) -> TopLogits:
        """Run int64 [R, S]; return the `count` highest logits of the last token, chosen on the GPU."""
        with torch.cuda.stream(self._stream):
            logits = self._advance(held, feeds, 1)
            return top_logits(logits[:, -1] if logits.dim() == 3 else logits, count)

    def _advance(self, held: TensorrtDecodeState, feeds: Feeds, last: int) -> Tensor:
        """Run a step; return its logits on the GPU; called on the engines' stream."""
        engine = self._engine(self._graphs.main.name)
        num_logits = max(1, last)  # 0 would mean all
        feeds = cache_feeds(feeds, self._cache_length)
        part_logits = []
        for state_part in held.parts:
            # engines built before this input existed return the logits of all tokens
            inputs = _to_gpu(feeds, state_part.rows) | {NUM_LOGITS_INPUT: torch.tensor(num_logits)}
            outputs = engine(inputs | state_part.shared | state_part.caches, state_part.buffers)
            state_part.caches = {
                name: outputs[PRESENT_PREFIX + name.removeprefix(PAST_PREFIX)] for name in self._past
            }
            logits = outputs["logits"]
            part_logits.append(logits[:, -num_logits:] if logits.dim() == 3 else logits)
        return _concat_batches(part_logits)

    @torch.inference_mode()
    def reorder_cache(self, held: TensorrtDecodeState, rows: Tokens, shared: bool) -> None:
        """Replace row i by row rows[i], in parts of at most the engine's number of rows."""
        with torch.cuda.stream(self._stream):
            indices = torch.from_numpy(np.ascontiguousarray(rows)).to(CUDA_DEVICE)
            old = held.parts
            slices = self._split_decoder_rows(len(rows))
            if len(old) == len(slices) == 1:
                held.parts = [_reorder_batch(old[0], indices, shared)]
                return
            caches = _reorder_rows([state_part.caches for state_part in old], indices)
            common = _reorder_rows([state_part.shared for state_part in old], indices) if shared else {}
            held.parts = [
                EngineBatch(
                    row_slice,
                    {name: tensor[row_slice] for name, tensor in caches.items()},
                    {name: tensor[row_slice] for name, tensor in common.items()} if shared else old[i].shared,
                )
                for i, row_slice in enumerate(slices)
            ]

    def close(self) -> None:
        """Free engines and contexts."""
        self._engines.clear()
        self._threads.release()


def _split_rows(start: int, stop: int, most: int) -> list[slice]:
    return [slice(first, min(stop, first + most)) for first in range(start, stop, most)]


def _to_gpu(feeds: Feeds, rows: slice, axes: Mapping[str, int | None] = NO_SAMPLE_AXES) -> dict[str, Tensor]:
    """Return some rows of the inputs, on axis 0 or that of `axes`; an engine ignores unknown names."""
    tensors = {}
    for name, values in feeds.items():
        axis = axes.get(name, _ROWS)
        selected = values if axis is None else values[(slice(None),) * axis + (rows,)]
        tensors[name] = torch.from_numpy(np.ascontiguousarray(selected).reshape(selected.shape))
    return {name: tensor.to(CUDA_DEVICE, non_blocking=True) for name, tensor in tensors.items()}


def _reorder_batch(batch: EngineBatch, rows: Tensor, shared: bool) -> EngineBatch:
    """Return the batch with row rows[i] as row i; its caches are in the other buffers."""
    caches = {}
    for name, cache in batch.caches.items():
        memory = batch.buffers.next(name, (len(rows), *cache.shape[1:]), cache.dtype)
        caches[name] = torch.index_select(cache, _ROWS, rows, out=memory)
    common = _reorder_rows([batch.shared], rows) if shared else batch.shared
    return EngineBatch(slice(0, len(rows)), caches, common, batch.buffers)


def _reorder_rows(parts: list[dict[str, Tensor]], rows: Tensor) -> dict[str, Tensor]:
    return {
        name: _concat_batches([state_part[name] for state_part in parts]).index_select(0, rows)
        for name in parts[0]
    }


def _concat_batches(parts: list[Tensor], axis: int = _ROWS) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _to_numpy(parts: list[Tensor], axis: int = _ROWS) -> NDArray[Any]:
    """Copy to the CPU, which waits for the GPU; the result may be written to, floats are float32."""
    tensor = _concat_batches(parts, axis)
    array: NDArray[Any] = (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
    return array
