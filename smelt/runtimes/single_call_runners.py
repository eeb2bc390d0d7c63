"""Runners that call one graph once for a batch.

These are classifiers, sentence embedders, and any third-party graph, from arrays to arrays. Labels and
probabilities are computed from a classifier's logits. The interface is `smelt/generation/runner.py`.

Shapes: B = batch, n = texts, C = classes, D = dimension of a text's vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, RunError
from smelt.data.label_thresholds import predicted_labels
from smelt.data.labels import MULTI_LABEL, REGRESSION, class_names, problem_type
from smelt.data.npz_arrays import SampleArrays
from smelt.generation.backend import (
    Backend,
    Batch,
    FeedBatch,
    GraphInterface,
    Logits,
    ModelGraphs,
    check_finite_outputs,
)
from smelt.generation.runner import ModelFiles, Runner, TokenGenerator
from smelt.runtimes.onnx_import.signature import GraphSignature, read_signature
from smelt.stage import Progress, no_progress

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

    label: the class with the highest probability; of a multi-label model the classes above their thresholds;
    of a regression model the number, or the tuple of its numbers. probabilities: by class, 0 to 1; empty for
    regression.
    """

    label: str | tuple[str, ...] | float | tuple[float, ...]
    probabilities: Mapping[str, float]


def number_or_numbers(outputs: NDArray[np.float32]) -> float | tuple[float, ...]:
    """Return the outputs of a regression model, [C], as a number, or a tuple if there are several."""
    numbers = tuple(map(float, outputs))
    return numbers[0] if len(numbers) == 1 else numbers


def predictions_from_logits(logits: NDArray[np.float32], config: Mapping[str, Any]) -> list[ClassPrediction]:
    """Return the predictions of float32 `logits` [n, C], by the config's labels and problem type.

    Raises:
        RunError: `non-finite-outputs`: argmax of NaN would be a class.
    """
    check_finite_outputs(logits)
    problem = problem_type(config)
    if problem == REGRESSION:
        return [ClassPrediction(number_or_numbers(row), {}) for row in logits]
    names = class_names(config)
    values = logits.astype(np.float64)
    if problem == MULTI_LABEL:
        probabilities = 1 / (1 + np.exp(-values))
        predicted = [tuple(names[i] for i in row.nonzero()[0]) for row in predicted_labels(logits, config)]
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


@dataclass(frozen=True)
class ArrayBatch(FeedBatch):
    """Inputs of a module of arrays. arrays: by name, each [B, ...]."""

    arrays: GraphOutputs

    @property
    def feeds(self) -> GraphOutputs:
        """The arrays."""
        return self.arrays


class GraphRunner(Runner):
    """A `Runner` of arrays. signature: inputs and outputs of the graph."""

    graphs: ClassVar[ModelGraphs] = ModelGraphs(
        GraphInterface(MODEL_GRAPH, frozenset(), frozenset()), uses_cache=False
    )
    signature: GraphSignature

    def __init__(self, files: ModelFiles, backend: Backend, generator: TokenGenerator) -> None:
        super().__init__(files, backend, generator)
        self.signature = read_signature(files.folder)

    def forward(self, batch: Any) -> Logits:
        """Return all outputs for an `ArrayBatch` in one array, float32 [B, N], in their order."""
        outputs = self.run(batch.arrays)
        rows = [outputs[value.name] for value in self.signature.outputs]
        return np.concatenate([each.reshape(len(each), -1) for each in rows], axis=1)

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
    size = arrays.max_batch_size or fixed or batch_size
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
