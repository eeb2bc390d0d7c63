"""Runs the TensorRT engine of a decoder-only language model, with the caches kept on the GPU.

One engine, `model.plan`, serves prompts and single tokens: input_ids and position_ids [B, S],
attention_mask [B, P + S], caches [B, K, P, d] -> logits [B, N, V], caches [B, K, P + S, d]. The scalar
num_logits_to_keep, which lies on the host, says of how many of the last tokens logits are wanted: N, 0 for S.

Shapes: B = batch, L = prompt, S = tokens fed at once, P = tokens fed before, K = key-value heads,
d = width of a head, V = vocabulary.
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
from smelt.runtime.causal import KEEP, positions
from smelt.runtime.text.limits import position_limit
from smelt.runtime.text.tools import TextTools

_BATCH, _LENGTH = 0, 1  # places in input_ids [B, S]
_TOKENS = 2  # the place in a cache [B, K, P, d]


@dataclass
class CausalState:
    """mask: int64 [B, P], 1 where a token was fed. caches: input name -> tensor [B, K, P, d] on the GPU."""

    mask: Tokens
    caches: dict[str, Tensor]


class TensorrtCausalRunner:
    """A `CausalRunner` over one engine; more rows or tokens than it takes at once go one after another."""

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
        self.text = TextTools(self.folder, self.config, self.generation_config)
        path = artifact.path / "model.plan"
        if not path.is_file():
            raise InputError(f"{path}: no such engine. Run the tensorrt stage again to build it.")
        # a stream of our own; on the default stream TensorRT synchronizes more
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._engine: Engine | None = Engine(trt, path, self._stream)
        self._past = [name for name in self._engine.inputs if name.startswith("past_key_values.")]
        if not self._past:
            raise InputError(f"{path}: not the engine of a language model with a cache.")
        self._most_rows = self._engine.longest("input_ids", _BATCH)
        self._most_tokens = self._engine.longest("input_ids", _LENGTH)
        # a text may be as long as model and engine both allow
        limits = [position_limit(self.config), self._engine.longest(self._past[0], _TOKENS) + 1]
        self.config["max_position_embeddings"] = min(n for n in limits if n)
        self._threads = TorchThreads(threads)  # the last line: an engine that does not load changes nothing

    def forward(self, batch: Batch) -> Logits:
        """Return float32 [B, L, V] for a batch padded on the right."""
        return self.extend(self.start(batch.input_ids.shape[0]), batch.input_ids, batch.attention_mask)

    def encode(self, batch: Batch) -> CausalState:
        """Feed all tokens but the last of a batch that is padded on the left."""
        state = self.start(batch.input_ids.shape[0])
        if batch.input_ids.shape[1] > 1:
            self.extend(state, batch.input_ids[:, :-1], batch.attention_mask[:, :-1], last=1)
        return state

    def decode_step(self, state: CausalState, tokens: Tokens) -> Logits:
        """Feed one token per row (int64 [B]); return float32 [B, V]."""
        ids = tokens[:, None]
        return self.extend(state, ids, np.ones_like(ids))[:, -1]

    def start(self, rows: int) -> CausalState:
        """Return the state of `rows` rows that have seen nothing."""
        engine = self._open()
        caches = {}
        for name in self._past:
            _, heads, _, width = engine.engine.get_tensor_shape(name)
            caches[name] = torch.empty((rows, heads, 0, width), dtype=engine.types[name], device=DEVICE)
        return CausalState(np.zeros((rows, 0), dtype=np.int64), caches)

    @torch.inference_mode()
    def extend(self, state: CausalState, ids: Tokens, mask: Tokens, last: int = 0) -> Logits:
        """Feed int64 [B, S] with their mask, advance `state`, return float32 [B, S or last, V].

        Args:
            state: changed in place.
            ids: what to feed.
            mask: 1 where a token is.
            last: of how many of the last tokens logits are wanted; 0 for all.

        Raises:
            RunError: more tokens in all than the engine was built for, or the GPU failed.
        """
        length = ids.shape[1]
        first = length - last if last else 0  # the first token whose logits are wanted
        with torch.cuda.stream(self._stream):
            found = []
            for at in range(0, length, self._most_tokens):
                end = min(length, at + self._most_tokens)
                wanted = min(end - first, end - at)
                logits = self._feed(state, ids[:, at:end], mask[:, at:end], max(1, wanted))
                if wanted > 0:
                    found.append(logits)
            return np.concatenate(found, axis=1) if len(found) > 1 else found[0]

    def _feed(self, state: CausalState, ids: Tokens, mask: Tokens, last: int) -> Logits:
        """Feed at most as many tokens as the engine takes at once, part of the rows after part."""
        engine = self._open()
        whole = np.concatenate([state.mask, mask], axis=1)
        places = positions(whole)[:, -ids.shape[1] :]
        # engines built before it was there give the logits of all tokens
        keep = {KEEP: torch.tensor(last)} if KEEP in engine.inputs else {}
        logits, caches = [], []
        for at in range(0, ids.shape[0], self._most_rows):
            rows = slice(at, at + self._most_rows)
            fields = {"input_ids": ids, "attention_mask": whole, "position_ids": places}
            feeds = {name: _to_gpu(values[rows]) for name, values in fields.items()} | keep
            outputs = engine(feeds | {name: cache[rows] for name, cache in state.caches.items()})
            logits.append(outputs["logits"][:, -last:].float())
            caches.append({name: outputs[_present(name)] for name in self._past})
        state.mask = whole
        state.caches = {name: _joined([part[name] for part in caches]) for name in self._past}
        result: Logits = _joined(logits).cpu().numpy()
        return result

    @torch.inference_mode()
    def reorder(self, state: CausalState, rows: Tokens) -> CausalState:
        """Return the state whose row i is the row rows[i] (int64 [R]) of `state`, which is used up."""
        if not np.array_equal(rows, np.arange(state.mask.shape[0])):
            with torch.cuda.stream(self._stream):
                there = _to_gpu(rows)
                state.mask = state.mask[rows]
                state.caches = {n: cache.index_select(0, there) for n, cache in state.caches.items()}
        return state

    def _open(self) -> Engine:
        if self._engine is None:
            raise InputError(f"{self.folder}: this runner was closed.")
        return self._engine

    def close(self) -> None:
        """Free the engine and its context."""
        self._engine = None
        self._threads.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _present(name: str) -> str:
    return f"present.{name.removeprefix('past_key_values.')}"


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _to_gpu(values: Tokens) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(DEVICE, non_blocking=True)
