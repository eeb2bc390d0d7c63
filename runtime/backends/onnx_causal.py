"""Runs an onnx artifact of a decoder-only language model in ONNX Runtime.

The caches that one call leaves are the inputs of the next, as OrtValues; only logits become numpy arrays.

Shapes: B = batch, L = prompt, S = tokens fed at once, P = tokens fed before, K = key-value heads,
d = width of a head, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import onnxruntime

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json
from smelt.runtime.backends.device import onnx_device
from smelt.runtime.backends.onnx_runner import open_session, take_rows
from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.causal import KEEP, positions
from smelt.runtime.text.tools import TextTools

_KINDS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


@dataclass
class CausalState:
    """mask: int64 [B, P], 1 where a token was fed. caches: OrtValues [B, K, P, d], as the graph's inputs."""

    mask: Tokens
    caches: list[Any]


class OnnxCausalRunner:
    """A `CausalRunner` over one ONNX Runtime session: CPU, or CUDA where the target is ort-cuda."""

    name = "onnxruntime"
    version: str = onnxruntime.__version__

    def __init__(self, artifact: Artifact, threads: int | None = None, device: str = "auto") -> None:
        self._load(artifact.path, artifact.manifest.facts.get("target"), threads, device)

    @classmethod
    def over(cls, folder: Path, target: str, threads: int | None = None, device: str = "auto") -> Self:
        """Open the graph in `folder`, which is not an artifact yet."""
        runner = cls.__new__(cls)
        runner._load(folder, target, threads, device)
        return runner

    def _load(self, folder: Path, target: str | None, threads: int | None, device: str) -> None:
        self.folder = folder
        self.config: dict[str, Any] = read_json(folder / "config.json")
        self.generation_config: dict[str, Any] = read_json(folder / "generation_config.json")
        self.text = TextTools(self.folder, self.config, self.generation_config)
        self.device = onnx_device(device, target)
        path = folder / "model.onnx"
        if not path.is_file():
            raise InputError(f"{path}: no such graph. Run the onnx stage again to make it anew.")
        self._session: Any = open_session(path, threads, self.device)
        inputs = {i.name: i for i in self._session.get_inputs()}
        self._past = [name for name in inputs if name.startswith("past_key_values.")]
        outputs = {o.name for o in self._session.get_outputs()}
        wanted = {"input_ids", "attention_mask", "position_ids"}
        present = {_present(name) for name in self._past}
        if not self._past or not wanted <= set(inputs) or not present | {"logits"} <= outputs:
            raise InputError(
                f"{path}: not the graph of a language model with a cache; it has the inputs"
                f" {', '.join(inputs)} and the outputs {', '.join(sorted(outputs))}."
                " Run the onnx stage again to make it anew."
            )
        # graphs made before there was such an input give the logits of all tokens
        self._may_keep = any(i.name == KEEP for i in self._session.get_overridable_initializers())
        self._must_keep = KEEP in inputs  # made for TensorRT, where no input has a default
        shapes = [inputs[name] for name in self._past]
        self._empty = [(i.shape[1], i.shape[3], _KINDS[i.type]) for i in shapes]
        # its fused attention takes several tokens on top of a past only for one row
        self._by_row = (target or "ort-cpu") == "ort-cpu"

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
        empty = [np.zeros((rows, heads, 0, width), dtype=kind) for heads, width, kind in self._empty]
        return CausalState(np.zeros((rows, 0), dtype=np.int64), [self._value(e) for e in empty])

    def extend(self, state: CausalState, ids: Tokens, mask: Tokens, last: int = 0) -> Logits:
        """Feed int64 [B, S] with their mask, advance `state`, return float32 [B, S or last, V].

        Args:
            state: changed in place.
            ids: what to feed.
            mask: 1 where a token is.
            last: of how many of the last tokens logits are wanted; 0 for all.

        Raises:
            InputError: S > 1 on top of a past for more than one row, which the fused graph cannot take.
        """
        if self._by_row and ids.shape[0] > 1 and ids.shape[1] > 1 and state.mask.shape[1]:
            raise InputError("Several tokens on top of a past can be fed to this graph only for one row.")
        state.mask = np.concatenate([state.mask, mask], axis=1)
        places = positions(state.mask)[:, -ids.shape[1] :]
        fields = {"input_ids": ids, "attention_mask": state.mask, "position_ids": places}
        feeds = {name: np.ascontiguousarray(values) for name, values in fields.items()}
        if self._must_keep:
            feeds[KEEP] = np.array(last, dtype=np.int64)
        few = self._may_keep and 0 < last < ids.shape[1]
        logits, *state.caches = self._run_few(feeds, state, last) if few else self._run(feeds, state)
        found: Logits = logits.numpy()
        return found[:, -last:]  # 0 is all

    def _run(self, feeds: dict[str, Tokens], state: CausalState) -> list[Any]:
        """Return logits of all tokens and the caches."""
        binding = self._session.io_binding()
        for name, values in feeds.items():
            binding.bind_cpu_input(name, values)
        for name, cache in zip(self._past, state.caches, strict=True):
            binding.bind_ortvalue_input(name, cache)
        binding.bind_output("logits", "cpu")
        for name in self._past:
            binding.bind_output(_present(name), self.device)
        self._session.run_with_iobinding(binding)
        return list(binding.get_outputs())

    def _run_few(self, feeds: dict[str, Tokens], state: CausalState, last: int) -> list[Any]:
        """Return logits of the last tokens and the caches; a binding does not take inputs with a default."""
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
        values[KEEP] = onnxruntime.OrtValue.ortvalue_from_numpy(np.array(last, dtype=np.int64))
        values |= dict(zip(self._past, state.caches, strict=True))
        names = ["logits", *map(_present, self._past)]
        logits, *caches = self._session.run_with_ort_values(names, values)
        there = caches if self.device == "cpu" else [self._value(cache.numpy()) for cache in caches]
        return [logits, *there]

    def reorder(self, state: CausalState, rows: Tokens) -> CausalState:
        """Return the state whose row i is the row rows[i] (int64 [R]) of `state`, which is used up."""
        if not np.array_equal(rows, np.arange(state.mask.shape[0])):
            state.mask = state.mask[rows]
            state.caches = [self._value(take_rows(cache.numpy(), rows)) for cache in state.caches]
        return state

    def _value(self, array: Any) -> Any:
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self.device)

    def close(self) -> None:
        """Free the session and its threads."""
        self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _present(name: str) -> str:
    return f"present.{name.removeprefix('past_key_values.')}"
