"""Runs TensorRT engines on an NVIDIA GPU, with the caches kept there.

Shapes: B = batch, L = source length, P = tokens fed so far, H = heads, d = width of a head,
V = vocabulary, C = classes. API: TensorRT 11; buffers are torch CUDA tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json
from smelt.runtime.backends.tensorrt_engine import DEVICE, Engine
from smelt.runtime.backends.tensorrt_module import import_tensorrt
from smelt.runtime.backends.torch_threads import TorchThreads
from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.text.tools import TextTools

_BATCH, _LENGTH = 0, 1  # places in input_ids [B, L]
_DECODER = "decoder_with_past_model"


@dataclass
class Part:
    """Up to `max_batch_size` rows of a batch on the GPU. caches: decoder input name -> tensor."""

    rows: slice
    mask: Tensor
    caches: dict[str, Tensor]


@dataclass
class State:
    """The parts of a batch. sentences: int64 [R], the batch's row that each row goes on from.

    cross: the caches that all beams of a sentence share.
    """

    parts: list[Part]
    sentences: Tokens
    cross: frozenset[str] = frozenset()

    def reorder(self, rows: Tokens, slices: list[slice]) -> None:
        """Make row i what row `rows[i]` was, in parts of the rows `slices`; shared caches may stay."""
        sentences = self.sentences[rows]
        same = np.array_equal(sentences, self.sentences)
        kept = self.cross if same else frozenset()
        old = self.parts
        there = torch.from_numpy(np.ascontiguousarray(rows)).to(old[0].mask.device)

        def moved(tensors: list[Tensor]) -> Tensor:
            whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            return whole.index_select(0, there)

        caches = {n: moved([p.caches[n] for p in old]) for n in old[0].caches if n not in kept}
        mask = None if same else moved([p.mask for p in old])
        self.sentences = sentences
        self.parts = [
            Part(
                rows=at,
                mask=old[i].mask if mask is None else mask[at],
                caches={n: t[at] for n, t in caches.items()} | {n: old[i].caches[n] for n in kept},
            )
            for i, at in enumerate(slices)
        ]


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
        self.folder = artifact.path
        self.config: dict[str, Any] = read_json(artifact.path / "config.json")
        self.generation_config: dict[str, Any] = read_json(artifact.path / "generation_config.json")
        # all work and all memory on one stream of our own; on the default stream TensorRT synchronizes more
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            plans = sorted(artifact.path.glob("*.plan"))
            found = {path.stem: Engine(trt, path, self._stream) for path in plans}
        self._engines: dict[str, Engine] = found
        first = found.get("model") or found.get("encoder_model")
        if first is None:
            raise InputError(f"{artifact.path}: neither model.plan nor encoder_model.plan is here.")
        self._most_rows = first.longest("input_ids", _BATCH)
        # texts that are longer than the engine takes are cut, and counted, where all others are; how long
        # an output may be is the model's matter, not that of the engine for the source
        longest = first.longest("input_ids", _LENGTH)
        self.text = TextTools(self.folder, self.config, self.generation_config, longest)
        self._threads = TorchThreads(threads)  # the last line: an engine that does not load changes nothing

    def _named(self, name: str) -> Engine:
        if name not in self._engines:
            known = ", ".join(f"{found}.plan" for found in self._engines) or "nothing: it was closed"
            raise InputError(f"{self.folder}: this needs {name}.plan, and there is {known}.")
        return self._engines[name]

    def _slices(self, rows: int) -> list[slice]:
        return [slice(at, min(rows, at + self._most_rows)) for at in range(0, rows, self._most_rows)]

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Logits:
        """Return class logits, float32 [B, C]."""
        with torch.cuda.stream(self._stream):
            parts = []
            for rows in self._slices(batch.input_ids.shape[0]):
                outputs = self._named("model")(_feeds(batch, rows))
                parts.append(outputs["logits"].float())
            return _to_numpy(torch.cat(parts))

    @torch.inference_mode()
    def encode(self, batch: Batch) -> State:
        """Run the encoder, which also gives the cross-attention keys and values; start empty caches."""
        with torch.cuda.stream(self._stream):
            rows = batch.input_ids.shape[0]
            parts = [self._encode_part(batch, part) for part in self._slices(rows)]
        cross = {_past(name) for name in self._named("encoder_model").outputs if name.startswith("present.")}
        return State(parts, np.arange(rows), frozenset(cross))

    def _encode_part(self, batch: Batch, rows: slice) -> Part:
        encoder, decoder = self._named("encoder_model"), self._named(_DECODER)
        feeds = _feeds(batch, rows)
        outputs = encoder(feeds)
        caches = {_past(name): t for name, t in outputs.items() if name.startswith("present.")}
        for name in decoder.inputs:
            if name.startswith("past_key_values.") and name not in caches:
                _, heads, _, width = decoder.engine.get_tensor_shape(name)
                shape = (rows.stop - rows.start, heads, 0, width)
                caches[name] = torch.empty(shape, dtype=decoder.types[name], device=DEVICE)
        return Part(rows, feeds["attention_mask"], caches)

    @torch.inference_mode()
    def decode_step(self, state: State, tokens: Tokens) -> Logits:
        """Feed one token per row (int64 [B]); the caches stay on the GPU; return float32 [B, V]."""
        decoder = self._named(_DECODER)
        with torch.cuda.stream(self._stream):
            logits = []
            for part in state.parts:
                feeds = {"input_ids": _to_gpu(tokens[part.rows, None]), "encoder_attention_mask": part.mask}
                outputs = decoder(feeds | part.caches)
                part.caches |= {_past(name): t for name, t in outputs.items() if name.startswith("present.")}
                logits.append(outputs["logits"].float())
            return _to_numpy(torch.cat(logits))

    @torch.inference_mode()
    def reorder(self, state: State, rows: Tokens) -> State:
        """Return the state whose row i is the row rows[i] of `state`; the caches stay on the GPU."""
        with torch.cuda.stream(self._stream):
            state.reorder(rows, self._slices(len(rows)))
        return state

    def close(self) -> None:
        """Free engines and contexts."""
        self._engines.clear()
        self._threads.give_back()

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
    return torch.from_numpy(np.ascontiguousarray(values)).to(DEVICE, non_blocking=True)


def _to_numpy(tensor: Tensor) -> Logits:
    """Copy to the CPU, which waits for the GPU; the result may be written to."""
    result: Logits = tensor.cpu().numpy()
    return result
