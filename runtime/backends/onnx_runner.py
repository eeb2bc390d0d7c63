"""Runs an onnx artifact in ONNX Runtime.

The encoder leaves the keys and values of cross-attention as OrtValues, which every decoder step binds
as they are; the self-attention caches that one step leaves are the inputs of the next. Only logits
become numpy arrays.

Shapes: B = batch, L = source length, P = past length, H = heads, d = width of a head, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, MissingDependencyError
from smelt.core.files import read_json
from smelt.runtime.backends.device import NO_ORT_CUDA, onnx_device
from smelt.runtime.batch import Batch, Logits, Tokens
from smelt.runtime.text.tools import TextTools

_MAKE_AGAIN = "Run the onnx stage again to make it anew."


@dataclass
class _State:
    """The bound inputs of the next decoder step.

    caches: OrtValues, the keys and values of self-attention, in the order of the runner's names; shared:
    input name -> OrtValue, what all steps and all beams of a sentence share. sentences: int64 [R], the
    batch's row that each row goes on from.
    """

    binding: Any
    caches: list[Any]
    shared: dict[str, Any]
    sentences: Tokens


class OnnxRunner:
    """A `Runner` over ONNX Runtime sessions: CPU, or CUDA where the artifact's target is ort-cuda."""

    name = "onnxruntime"
    version: str = onnxruntime.__version__

    def __init__(self, artifact: Artifact, threads: int | None = None, device: str = "auto") -> None:
        self._load(artifact.path, artifact.manifest.facts.get("target"), threads, device)

    @classmethod
    def over(cls, folder: Path, target: str, threads: int | None = None, device: str = "auto") -> Self:
        """Open the graphs in `folder`, which is not an artifact yet."""
        runner = cls.__new__(cls)
        runner._load(folder, target, threads, device)
        return runner

    def _load(self, folder: Path, target: str | None, threads: int | None, device: str = "auto") -> None:
        self.folder: Path = folder
        self.config: dict[str, Any] = read_json(self.folder / "config.json")
        self.generation_config: dict[str, Any] = read_json(self.folder / "generation_config.json")
        self.text = TextTools(self.folder, self.config, self.generation_config)
        self.device = self._device = onnx_device(device, target)
        self._threads = threads
        self._model = self._encoder = self._decoder = None
        if (self.folder / "model.onnx").is_file():
            self._model = self._open("model.onnx", {"input_ids", "attention_mask"}, {"logits"})
            return
        self._encoder = self._open(
            "encoder_model.onnx", {"input_ids", "attention_mask"}, {"last_hidden_state"}
        )
        wanted = {"input_ids", "encoder_attention_mask"}
        self._decoder = self._open("decoder_with_past_model.onnx", wanted, {"logits"})
        self._pair_caches()

    def _open(self, file: str, inputs: set[str], outputs: set[str]) -> Any:
        path = self.folder / file
        if not path.is_file():
            raise InputError(f"{path}: no such graph. {_MAKE_AGAIN}")
        session = open_session(path, self._threads, self._device)
        found_in, found_out = {i.name for i in session.get_inputs()}, {o.name for o in session.get_outputs()}
        if lacking := (inputs - found_in) | (outputs - found_out):
            raise InputError(
                f"{path}: this graph has no {', '.join(sorted(lacking))}; it has the inputs"
                f" {', '.join(sorted(found_in))} and the outputs {', '.join(sorted(found_out))}."
                f" {_MAKE_AGAIN}"
            )
        return session

    def _pair_caches(self) -> None:
        """Find which output becomes which input of the decoder, and what an empty cache looks like."""
        assert self._encoder is not None
        assert self._decoder is not None
        inputs = {i.name: i for i in self._decoder.get_inputs()}
        outputs = [o.name for o in self._decoder.get_outputs() if o.name != "logits"]
        cross = [o.name for o in self._encoder.get_outputs() if o.name != "last_hidden_state"]
        caches = {f"past_key_values.{n.removeprefix('present.')}" for n in outputs + cross}
        expected = {"input_ids", "encoder_attention_mask"} | caches
        if set(inputs) != expected:
            odd = ", ".join(sorted(set(inputs) ^ expected))
            raise InputError(
                f"{self.folder}: encoder and decoder graphs do not fit each other: {odd}. {_MAKE_AGAIN}"
            )
        self._present, self._cross = outputs, cross
        self._past = [_past(name) for name in outputs]
        kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        past = [inputs[name] for name in self._past]
        self._empty = [(p.shape[1], p.shape[3], kinds[p.type]) for p in past]

    def forward(self, batch: Batch) -> Logits:
        """Return class logits, float32 [B, C]."""
        if self._model is None:
            raise InputError(f"{self.folder}: these graphs generate text; they do not classify.")
        feeds = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if any(i.name == "token_type_ids" for i in self._model.get_inputs()):
            types = batch.token_type_ids
            feeds["token_type_ids"] = np.zeros_like(batch.input_ids) if types is None else types
        logits: Logits = self._model.run(["logits"], feeds)[0]
        return logits

    def encoder_outputs(self, batch: Batch) -> dict[str, NDArray[np.floating[Any]]]:
        """Return the encoder's outputs by name: hidden states [B, L, D], keys and values [B, H, L, d]."""
        assert self._encoder is not None
        feeds = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        names = [output.name for output in self._encoder.get_outputs()]
        return dict(zip(names, self._encoder.run(names, feeds), strict=True))

    def encode(self, batch: Batch) -> _State:
        """Run the encoder; bind what all decoder steps share, and empty caches."""
        if self._encoder is None or self._decoder is None:
            raise InputError(f"{self.folder}: this graph classifies; it does not generate text.")
        encoder = self._encoder.io_binding()
        encoder.bind_cpu_input("input_ids", np.ascontiguousarray(batch.input_ids))
        encoder.bind_cpu_input("attention_mask", np.ascontiguousarray(batch.attention_mask))
        for name in self._cross:
            encoder.bind_output(name, self._device)
        self._encoder.run_with_iobinding(encoder)
        decoder = self._decoder.io_binding()
        made = encoder.get_outputs()
        shared = {_past(name): value for name, value in zip(self._cross, made, strict=True)}
        shared["encoder_attention_mask"] = self._value(batch.attention_mask)
        rows = batch.input_ids.shape[0]
        caches = [
            self._value(np.zeros((rows, heads, 0, width), dtype=kind)) for heads, width, kind in self._empty
        ]
        for name, value in (*shared.items(), *zip(self._past, caches, strict=True)):
            decoder.bind_ortvalue_input(name, value)
        return _State(decoder, caches, shared, np.arange(rows))

    def decode_step(self, state: _State, tokens: Tokens) -> Logits:
        """Feed one token per row (int64 [B]); return float32 [B, V]."""
        assert self._decoder is not None
        binding = state.binding
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(tokens).reshape(-1, 1))
        # outputs are bound anew: they grow, and what the last step left is now an input
        binding.bind_output("logits", "cpu")
        for name in self._present:
            binding.bind_output(name, self._device)
        self._decoder.run_with_iobinding(binding)
        logits, *state.caches = binding.get_outputs()
        for name, value in zip(self._past, state.caches, strict=True):
            binding.bind_ortvalue_input(name, value)
        out: Logits = logits.numpy()
        return out

    def reorder(self, state: _State, rows: Tokens) -> _State:
        """Return the state whose row i is the row rows[i] of `state`; what beams share is not copied."""
        sentences = state.sentences[rows]
        if not np.array_equal(sentences, state.sentences):
            state.shared = self._bind_rows(state, state.shared, rows)
        elif np.array_equal(rows, np.arange(len(rows))):
            return state
        state.sentences = sentences
        caches = dict(zip(self._past, state.caches, strict=True))
        state.caches = list(self._bind_rows(state, caches, rows).values())
        return state

    def _bind_rows(self, state: _State, values: dict[str, Any], rows: Tokens) -> dict[str, Any]:
        """Bind the rows `rows` of each of `values`, and return them."""
        # on the CPU `numpy` and `_value` only look at the memory: `take_rows` makes the one copy
        moved = {name: self._value(take_rows(value.numpy(), rows)) for name, value in values.items()}
        for name, value in moved.items():
            state.binding.bind_ortvalue_input(name, value)
        return moved

    def _value(self, array: NDArray[Any]) -> Any:
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self._device)

    def close(self) -> None:
        """Free the sessions and their threads."""
        self._model = self._encoder = self._decoder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_session(path: Path, threads: int | None = None, device: str = "cpu") -> Any:
    """Open the graph `path`.

    Raises:
        InputError: ONNX Runtime cannot read the file or does not know one of its operators.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    if lacks_vnni(Path("/proc/cpuinfo")):
        # there int8 products may overflow 16 bits; this asks for exact ones. With VNNI they are exact
        # anyway and this mode is slower: 21 ms instead of 10 for an int8 encoder of 288 rows
        options.add_session_config_entry("session.x64quantprecision", "1")
    # The fused node is slower than Add and LayerNormalization: measured on an int8 encoder of 4 layers,
    # 160 rows of 256: 4.7 ms with it, 2.8 ms without; on single rows there is no difference.
    providers = (
        ["CUDAExecutionProvider", "CPUExecutionProvider"] if device == "cuda" else ["CPUExecutionProvider"]
    )
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=providers, disabled_optimizers=["SkipLayerNormFusion"]
        )
    except Exception as error:  # its error classes share no base but Exception
        raise InputError(f"{path}: ONNX Runtime cannot load this graph: {error} {_MAKE_AGAIN}") from error
    if providers[0] not in session.get_providers():  # it warns, and goes on without the provider
        raise MissingDependencyError(f"{path}: {NO_ORT_CUDA}")
    return session


def lacks_vnni(cpuinfo: Path) -> bool:
    """Say whether this is an x86 processor known to lack instructions that sum int8 products in 32 bits.

    Args:
        cpuinfo: the file in which Linux lists the processor's features; elsewhere nothing is known.
    """
    try:
        words = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return False
    return "avx2" in words and not words & {"avx512_vnni", "avx_vnni", "amx_int8"}


def take_rows(array: NDArray[Any], rows: Tokens) -> NDArray[Any]:
    """Return `array[rows]`; over two dimensions `take` copies five times as fast as over four."""
    taken: NDArray[Any] = array.reshape(len(array), -1).take(rows, axis=0)
    return taken.reshape(len(rows), *array.shape[1:])


def _past(name: str) -> str:
    return f"past_key_values.{name.removeprefix('present.')}"
