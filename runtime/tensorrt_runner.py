"""Runs TensorRT engines on an NVIDIA GPU, with the caches kept there.

Shapes: B = batch, L = source length, P = tokens fed so far, H = heads, d = width of a head,
V = vocabulary, C = classes. API: TensorRT 11; buffers are torch CUDA tensors.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, RunError
from smelt.runtime.checkpoint import read_json
from smelt.runtime.runner import Batch, Logits, Tokens
from smelt.runtime.tensorrt_module import import_tensorrt, make_logger

_BATCH, _LENGTH = 0, 1  # places in input_ids [B, L]
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
    """One deserialized engine and its execution context.

    Raises:
        RunError: TensorRT cannot read the plan (built by another version, or for another GPU).
    """

    def __init__(self, trt: Any, path: Path) -> None:
        self._logger = make_logger(trt)
        self._runtime = trt.Runtime(self._logger)
        self._path = path
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
        self._types = {n: _TYPES[self.engine.get_tensor_dtype(n).name] for n in names}
        stream = torch.cuda.current_stream()
        if not self._context.set_optimization_profile_async(0, stream.cuda_stream):
            raise RunError(f"{path}: the engine's profile cannot be chosen. {self._said()}")
        stream.synchronize()

    def longest(self, name: str, place: int) -> int:
        """Return the largest size that the profile allows for a dimension of an input."""
        if -1 not in tuple(self.engine.get_tensor_shape(name)):
            return int(self.engine.get_tensor_shape(name)[place])
        return int(self.engine.get_tensor_profile_shape(name, 0)[2][place])

    def __call__(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run once on torch's current stream; takes and gives CUDA tensors. The outputs are new tensors.

        Raises:
            RunError: a shape is outside of the profile, or the GPU failed.
        """
        held = []  # on one stream, memory that is freed is reused only by work that comes later
        for name in self.inputs:
            tensor = feeds[name].to(self._types[name]).contiguous()
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise RunError(self._outside(name, tensor))
            held.append(_addressable(tensor))
            self._context.set_tensor_address(name, held[-1].data_ptr())
        missing = self._context.infer_shapes()
        if missing:
            names = ", ".join(missing)
            raise RunError(f"{self._path.name}: shapes are unknown for {names}. {self._said()}")
        outputs = {}
        for name in self.outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            outputs[name] = torch.empty(shape, dtype=self._types[name], device="cuda")
            held.append(_addressable(outputs[name]))
            self._context.set_tensor_address(name, held[-1].data_ptr())
        if not self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise RunError(f"{self._path.name}: the engine failed. TensorRT said: {self._said()}")
        return outputs

    def _outside(self, name: str, tensor: Tensor) -> str:
        least, _, most = (tuple(s) for s in self.engine.get_tensor_profile_shape(name, 0))
        return (
            f"{self._path.name}: input '{name}' has the shape {tuple(tensor.shape)}; the engine was built for"
            f" {least} to {most}. Build it with other tensorrt: {{max_batch_size, lengths, max_new_tokens}}."
        )

    def _said(self) -> str:
        return " / ".join(self._logger.errors[-3:]) or "nothing"


def _addressable(tensor: Tensor) -> Tensor:
    """Return `tensor`, or for an empty one something with an address, which TensorRT insists on."""
    return tensor if tensor.numel() else torch.empty(1, dtype=tensor.dtype, device=tensor.device)


@dataclass
class _Part:
    """Up to `max_batch_size` rows of a batch on the GPU. caches: decoder input name -> tensor."""

    rows: slice
    mask: Tensor
    caches: dict[str, Tensor]


class TensorrtRunner:
    """A `Runner` over TensorRT engines; batches larger than the engine's are split."""

    name = "tensorrt"
    device = "cuda"

    def __init__(self, artifact: Artifact, threads: int | None = None) -> None:
        trt = import_tensorrt()
        if not torch.cuda.is_available():
            raise InputError(
                "A TensorRT engine runs on an NVIDIA GPU, and torch sees none (smelt doctor says why)."
            )
        self.version: str = trt.__version__
        if threads is not None:
            torch.set_num_threads(threads)
        self.folder = artifact.path
        self.config: dict[str, Any] = read_json(artifact.path / "config.json")
        self.generation_config: dict[str, Any] = read_json(artifact.path / "generation_config.json")
        # all work and all memory on one stream of our own; on the default stream TensorRT synchronizes more
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            found = {path.stem: Engine(trt, path) for path in sorted(artifact.path.glob("*.engine"))}
        self._engines: dict[str, Engine] = found
        first = found.get("model") or found.get("encoder_model")
        if first is None:
            raise InputError(f"{artifact.path}: neither model.engine nor encoder_model.engine is here.")
        self._first = first
        self._most_rows = first.longest("input_ids", _BATCH)
        # texts that are longer than the engine takes are cut, and counted, where all others are
        limits = [self.config.get("max_position_embeddings"), first.longest("input_ids", _LENGTH)]
        self.config["max_position_embeddings"] = min(n for n in limits if n)

    def _slices(self, rows: int) -> list[slice]:
        return [slice(at, min(rows, at + self._most_rows)) for at in range(0, rows, self._most_rows)]

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Logits:
        """Return class logits, float32 [B, C]."""
        with torch.cuda.stream(self._stream):
            parts = []
            for rows in self._slices(batch.input_ids.shape[0]):
                outputs = self._first(_feeds(batch, rows))
                parts.append(outputs["logits"].float())
            return _to_numpy(torch.cat(parts))

    @torch.inference_mode()
    def encode(self, batch: Batch) -> list[_Part]:
        """Run the encoder, which also gives the cross-attention keys and values; start empty caches."""
        with torch.cuda.stream(self._stream):
            return [self._encode_part(batch, rows) for rows in self._slices(batch.input_ids.shape[0])]

    def _encode_part(self, batch: Batch, rows: slice) -> _Part:
        decoder = self._engines["decoder_with_past_model"]
        feeds = _feeds(batch, rows)
        outputs = self._first(feeds)
        caches = {_past(name): t for name, t in outputs.items() if name.startswith("present.")}
        for name in decoder.inputs:
            if name.startswith("past_key_values.") and name not in caches:
                _, heads, _, width = decoder.engine.get_tensor_shape(name)
                caches[name] = torch.empty((rows.stop - rows.start, heads, 0, width), device="cuda")
        return _Part(rows, feeds["attention_mask"], caches)

    @torch.inference_mode()
    def decode_step(self, state: list[_Part], tokens: Tokens) -> Logits:
        """Feed one token per row (int64 [B]); the caches stay on the GPU; return float32 [B, V]."""
        decoder = self._engines["decoder_with_past_model"]
        with torch.cuda.stream(self._stream):
            logits = []
            for part in state:
                feeds = {"input_ids": _to_gpu(tokens[part.rows, None]), "encoder_attention_mask": part.mask}
                outputs = decoder(feeds | part.caches)
                part.caches |= {_past(name): t for name, t in outputs.items() if name.startswith("present.")}
                logits.append(outputs["logits"].float())
            return _to_numpy(torch.cat(logits))

    def close(self) -> None:
        """Free engines and contexts."""
        self._engines.clear()
        with contextlib.suppress(AttributeError):
            del self._first

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _past(name: str) -> str:
    """Return the decoder input that takes the output `present.0.decoder.key` in the next step."""
    return name.replace("present", "past_key_values", 1)


def _feeds(batch: Batch, rows: slice) -> dict[str, Tensor]:
    """Return the inputs of the first engine for some rows; an engine takes those that it knows."""
    types = np.zeros_like(batch.input_ids) if batch.token_type_ids is None else batch.token_type_ids
    fields = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "token_type_ids": types}
    return {name: _to_gpu(values[rows]) for name, values in fields.items()}


def _to_gpu(values: Tokens) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).cuda(non_blocking=True)


def _to_numpy(tensor: Tensor) -> Logits:
    """Copy to the CPU, which waits for the GPU; the result may be written to."""
    result: Logits = tensor.cpu().numpy()
    return result
