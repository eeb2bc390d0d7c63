"""The interface of loaded models for every runtime, and the runners that call one graph once for a batch.

These are classifiers, sentence embedders, and any third-party graph, from arrays to arrays. Labels and
probabilities are computed from a classifier's logits.

Shapes: B = batch, L = tokens of the longest row, R = rows, S = input tokens of one call, V = vocabulary,
C = classes, D = dimension of a text's vector.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, RunError
from smelt.core.files import read_json_object
from smelt.core.stage import Progress, no_progress
from smelt.data.labels import MULTI_LABEL, REGRESSION, class_names, problem_type
from smelt.data.npz_arrays import SampleArrays
from smelt.generation.config import GenerationConfig, GenerationSettings, resolve_generation
from smelt.models.text_rules import (
    NO_LIMIT,
    lower_position_limit,
    max_input_length,
)
from smelt.models.tokenizer import TextTokenizer, open_tokenizer
from smelt.runtimes.backend import (
    Backend,
    Batch,
    Feeds,
    GraphInterface,
    Logits,
    ModelGraphs,
    Tokens,
    check_finite_outputs,
)
from smelt.runtimes.onnx_import.signature import GraphSignature, read_signature


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder and its two config files, as dicts."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]


def read_model_files(folder: Path) -> ModelFiles:
    """Read the config files in `folder`; a missing file is an empty dict.

    Raises:
        InputError: one of them is not JSON.
    """
    return ModelFiles(
        folder, read_json_object(folder / "config.json"), read_json_object(folder / "generation_config.json")
    )


_MAX_CACHED = 64  # settings; a caller with new ones in every call must not fill the memory


class TextTools:
    """Created when an artifact is opened, filled at first use, shared by all threads.

    folder: of the tokenizer's files. config, generation_config: the model's, as dicts; a runner may
    have corrected them. most: the runtime's maximum number of tokens of a text, where that is less than the
    model's.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any],
        most: int = NO_LIMIT,
    ) -> None:
        self.folder, self.config, self.generation_config = folder, config, generation_config
        self._most = most
        self._lock = threading.Lock()
        self._tokenizer: TextTokenizer | None = None
        self._decodings: dict[GenerationSettings, GenerationConfig] = {}

    @property
    def tokenizer(self) -> TextTokenizer:
        """Return the model's tokenizer.

        Raises:
            InputError: its files are missing or do not match.
        """
        if self._tokenizer is None:
            with self._lock:
                if self._tokenizer is None:
                    self._tokenizer = open_tokenizer(self.folder)
        return self._tokenizer

    @property
    def max_input_length(self) -> int:
        """Return the maximum number of tokens of a text."""
        return min(self._most, max_input_length(self.tokenizer, self.config))

    def resolved_generation(self, generation: GenerationSettings, runner: Any) -> GenerationConfig:
        """Return `generation` completed by the settings of the model of `runner`, whose tools these are.

        Raises:
            InputError: the generation config has a setting that smelt's loop does not support.
        """
        resolved = self._decodings.get(generation)
        if resolved is None:
            resolved = resolve_generation(generation, runner)
            if (
                len(self._decodings) < _MAX_CACHED
            ):  # a new dict, since another thread may be reading the old one
                self._decodings = {**self._decodings, generation: resolved}
        return resolved


class TokenGenerator(Protocol):
    """Generates texts for a batch of encoded ones, wherever the loop over their tokens runs.

    `generate_resolved` (`smelt/generation/search.py`) calls `runner` step by step;
    `generate_in_graph` (`smelt/generation/search.py`) calls a graph with the generation loop once.
    """

    def __call__(
        self, runner: Runner, batch: Batch, decoding: GenerationConfig, part: int = 0
    ) -> list[list[int]]:
        """Return each row's new tokens, including the final one; `part` is the number of the batch."""


class Runner(Protocol):
    """A loaded model: its files, and the backend that has opened its graphs. A context manager.

    Implementations: `ClassifierRunner`, `EmbedderRunner`, `EncoderDecoderRunner`, `DecoderOnlyRunner`.

    config: the model's Hugging Face config as a dict; generation_config likewise. text: converts texts
    to batches and tokens to texts. generator: called by `smelt.load(...).generate`.
    generation_cache: values that a generator keeps between calls.
    """

    chunked_prefill: ClassVar[bool] = False
    """Whether a text longer than one call's limit is processed in several calls."""
    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    text: TextTools
    backend: Backend
    generator: TokenGenerator
    generation_cache: dict[Any, Any]

    def __init__(self, files: ModelFiles, backend: Backend, generator: TokenGenerator) -> None:
        self.folder, self.config = files.folder, files.config
        self.generation_config = files.generation_config
        self.backend, self.generator = backend, generator
        self.generation_cache = {}
        most = backend.max_tokens_per_call
        if self.chunked_prefill:
            most = None
            if backend.max_total_tokens is not None:  # the limit is the smaller one of model and runtime
                lower_position_limit(self.config, backend.max_total_tokens)
        # texts longer than one call's limit are truncated, and counted, like those beyond the model's limit
        self.text = TextTools(self.folder, self.config, self.generation_config, most or NO_LIMIT)

    @property
    def name(self) -> str:
        """Return the runtime's name; with `version` and `device` part of every score's key."""
        return self.backend.name

    @property
    def version(self) -> str:
        """Return the runtime's version."""
        return self.backend.version

    @property
    def device(self) -> str:
        """Return the device: cpu or cuda."""
        return self.backend.device

    def forward(self, batch: Batch) -> Logits:
        """Return class logits, float32 [B, C]; for a decoder-only model those of all tokens, [B, L, V].

        For a sentence embedder the vectors of texts, [B, D].
        """
        raise InputError(
            f"{self.folder}: this model generates text and cannot classify. Use a classifier.",
            code="does-not-classify",
        )

    def _not_generating(self) -> InputError:
        return InputError(
            f"{self.folder}: this model is a classifier and cannot generate text. Use a model that"
            " generates text.",
            code="does-not-generate",
        )

    def encode(self, batch: Batch) -> Any:
        """Run the encoder or prompt of a batch; return the state that `decode_step` continues from."""
        raise self._not_generating()

    def decode_step(self, state: Any, tokens: Tokens) -> Logits:
        """Run one token per row (int64 [R]), update `state` in place, return float32 [R, V]."""
        raise self._not_generating()

    def generate_sequences(self, graph: str, batch: Batch, feeds: Feeds) -> Tokens:
        """Run a graph with the generation loop; return int64 [B, T], each row's prompt and new tokens.

        Args:
            graph: one of the backend's `generation_graphs`.
            batch: the prompts or source texts.
            feeds: search settings, see `smelt/generation/search.py`.
        """
        source = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        sequences: Tokens = self.backend.call(graph, {**source, **feeds})["sequences"]
        return sequences

    def reorder_cache(self, state: Any, rows: Tokens) -> Any:
        """Return the state whose row i is the row rows[i] (int64 [R]) of `state`, which becomes invalid.

        Beam search repeats and drops beams with it; so R may differ from the previous number of rows.
        """
        raise self._not_generating()

    def close(self) -> None:
        """Free the memory and the runtime's threads."""
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


MODEL_GRAPH = "model"


class ClassifierRunner(Runner):
    """A `Runner` that classifies texts."""

    graphs: ClassVar[ModelGraphs] = ModelGraphs(
        GraphInterface(MODEL_GRAPH, frozenset({"input_ids", "attention_mask"}), frozenset({"logits"})),
        uses_cache=False,
    )

    def forward(self, batch: Batch) -> Logits:
        """Return class logits, float32 [B, C]."""
        types = batch.token_type_ids
        feeds = {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask,
            "token_type_ids": np.zeros_like(batch.input_ids) if types is None else types,
        }
        logits: Logits = self.backend.call(MODEL_GRAPH, feeds)["logits"]
        return logits


@dataclass(frozen=True)
class ClassPrediction:
    """A classifier's prediction for one text.

    label: the class with the highest probability; of a multi-label model the classes above one half; of a
    regression model the number. probabilities: by class, 0 to 1; empty for regression.
    """

    label: str | tuple[str, ...] | float
    probabilities: Mapping[str, float]


def predictions_from_logits(logits: NDArray[np.float32], config: Mapping[str, Any]) -> list[ClassPrediction]:
    """Return the predictions of float32 `logits` [n, C], by the config's labels and problem type.

    Raises:
        RunError: `non-finite-outputs`: argmax of NaN would be a class.
    """
    check_finite_outputs(logits)
    problem = problem_type(config)
    if problem == REGRESSION:
        return [ClassPrediction(float(row[0]), {}) for row in logits]
    names = class_names(config)
    values = logits.astype(np.float64)
    if problem == MULTI_LABEL:
        probabilities = 1 / (1 + np.exp(-values))
        predicted = [tuple(n for n, p in zip(names, row, strict=True) if p > 0.5) for row in probabilities]
        return [
            ClassPrediction(label, dict(zip(names, map(float, row), strict=True)))
            for label, row in zip(predicted, probabilities, strict=True)
        ]
    probabilities = np.exp(values - values.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    return [
        ClassPrediction(names[int(row.argmax())], dict(zip(names, map(float, row), strict=True)))
        for row in probabilities
    ]


EMBEDDING_OUTPUT = "sentence_embedding"


class EmbedderRunner(Runner):
    """A `Runner` that returns vectors of texts."""

    graphs: ClassVar[ModelGraphs] = ModelGraphs(
        GraphInterface(
            MODEL_GRAPH, frozenset({"input_ids", "attention_mask"}), frozenset({EMBEDDING_OUTPUT})
        ),
        uses_cache=False,
    )

    def forward(self, batch: Batch) -> Logits:
        """Return the vectors of texts, float32 [B, D]."""
        feeds = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        vectors: Logits = self.backend.call(MODEL_GRAPH, feeds)[EMBEDDING_OUTPUT]
        return vectors


GraphOutputs = dict[str, NDArray[Any]]


class GraphRunner(Runner):
    """A `Runner` of arrays. signature: inputs and outputs of the graph."""

    graphs: ClassVar[ModelGraphs] = ModelGraphs(
        GraphInterface(MODEL_GRAPH, frozenset(), frozenset()), uses_cache=False
    )
    signature: GraphSignature

    def __init__(self, files: ModelFiles, backend: Backend, generator: TokenGenerator) -> None:
        super().__init__(files, backend, generator)
        self.signature = read_signature(files.folder)

    def run(self, feeds: GraphOutputs) -> GraphOutputs:
        """Return all outputs of one call, by name.

        Raises:
            RunError: the graph fails on these inputs.
        """
        try:
            return self.backend.call(MODEL_GRAPH, feeds)
        except InputError:
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no other common base
            error_text = " ".join(str(error).split())[:400]
            raise RunError(
                f"{self.folder}: the graph failed on these samples: {error_text}", code="graph-failed"
            ) from error


def run_batches(
    runner: GraphRunner, arrays: SampleArrays, batch_size: int, progress: Progress = no_progress
) -> Iterator[tuple[int, GraphOutputs]]:
    """Yield the outputs batch by batch, each with its number of samples.

    A graph with a fixed batch size gets as many samples as it takes, by repeating the last one.
    """
    fixed = runner.signature.fixed_batch_size
    size = fixed or batch_size
    for begin in range(0, arrays.num_samples, size):
        end = min(begin + size, arrays.num_samples)
        if fixed and end - begin < fixed:
            outputs = _run_padded(runner, arrays.select(range(begin, end)), fixed)
        else:
            outputs = runner.run(runner.signature.make_feeds(arrays, begin, end))
        progress(end, arrays.num_samples, "rows")
        yield end - begin, outputs


def _run_padded(runner: GraphRunner, arrays: SampleArrays, size: int) -> GraphOutputs:
    """Return the outputs of fewer samples than the graph's fixed batch `size`, by repeating the last one.

    Raises:
        RunError: an output does not have an entry for each sample.
    """
    outputs = runner.run(runner.signature.make_feeds(arrays.padded_to(size), 0, size))
    axes = {name: output_batch_axis(runner, name, output, size) for name, output in outputs.items()}
    sample_range = range(arrays.num_samples)
    return {name: np.take(output, sample_range, axes[name]) for name, output in outputs.items()}


def outputs_by_sample(
    runner: GraphRunner, arrays: SampleArrays, batch_size: int, progress: Progress = no_progress
) -> list[GraphOutputs]:
    """Return the outputs of each sample.

    Raises:
        RunError: an output of several samples does not have an entry for each of them.
    """
    by_sample: list[GraphOutputs] = []
    for num_samples, outputs in run_batches(runner, arrays, batch_size, progress):
        axes = {
            name: output_batch_axis(runner, name, output, num_samples) for name, output in outputs.items()
        }
        for index in range(num_samples):
            by_sample.append(
                {name: _select_sample(output, index, axes[name]) for name, output in outputs.items()}
            )
    return by_sample


def output_batch_axis(runner: GraphRunner, name: str, output: NDArray[Any], rows: int) -> int | None:
    """Return the sample axis of an output; None where it has none, after a call of one sample.

    Raises:
        RunError: `unclear-rows`, an output of several samples does not have an entry for each of them.
    """
    axis = next((value.axis for value in runner.signature.outputs if value.name == name), 0)
    if axis is not None and axis < output.ndim and output.shape[axis] == rows:
        return axis
    if rows > 1:
        raise RunError(
            f"the output '{name}' is {list(output.shape)} for {rows} samples, so it cannot be divided into"
            f" samples. {_missing_axis_advice(runner, name, output, rows)}",
            code="unclear-rows",
        )
    return None


def _missing_axis_advice(runner: GraphRunner, name: str, output: NDArray[Any], rows: int) -> str:
    """Return the advice about an output without a sample axis."""
    general_advice = (
        "Run single samples: score: {batch_size: 1} in a recipe, --batch-size 1 on the command line."
    )
    if runner.signature.fixed_batch_size not in (None, 1):
        general_advice = "Export the graph with a dynamic batch size, or without this output."
    axis = next((axis_index for axis_index, size in enumerate(output.shape) if size == rows), None)
    if axis is None:
        return general_advice
    setting_text = f"data: {{axes: {{{name}: {axis}}}}}"
    return f"If axis {axis} holds the samples, set {setting_text} in the recipe. Otherwise: {general_advice}"


def _select_sample(output: NDArray[Any], index: int, axis: int | None) -> NDArray[Any]:
    """Return the part of an output for one sample; all of it where no axis holds the samples."""
    return output if axis is None else np.asarray(np.take(output, index, axis))
