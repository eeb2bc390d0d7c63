"""The interface of a metric, and the samples that metrics score.

A metric stores a row of numbers for each example, and computes its value from the rows: an interval, or a
test between two steps, only combines rows again, and nothing is decoded twice.

Shapes: n = examples, K = numbers of a row, R = resamples, C = classes; weights [R, n] count how often each
example was drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import InputError, did_you_mean
from smelt.data.splits import Split
from smelt.stage import Settings

RESAMPLES = 1000
BOOTSTRAP_SEED = 12345  # sacrebleu's default, so that both draw the same examples
BOOTSTRAP_SIGNATURE = f"ci:t, bootstrap|bs:{RESAMPLES}|seed:{BOOTSTRAP_SEED}"

Array = NDArray[np.float64]
Rows = list[list[int | float]]
Outputs = Mapping[str, NDArray[Any]]
OutputShapes = Mapping[str, tuple[int | str | None, ...] | None]
"""The shapes of a graph's outputs, by name; None where the number of axes is not known."""
MetricKind = Literal["proportion", "mean", "sum", "corpus"]
MetricSettingValues = Mapping[str, Mapping[str, Any]]
"""The settings of metrics that a recipe gives, by metric."""

CORRELATION_LIMITS = (-100.0, 100.0)
ERROR_LIMITS = (0.0, math.inf)


@dataclass(frozen=True)
class Samples:
    """What metrics of one kind score; examples: a hash of the references or gold labels."""

    examples: str


@dataclass(frozen=True)
class TextSamples(Samples):
    """n generated texts, with one or more references each.

    language: of the references, an ISO 639 code, where it is known. base: the folder that paths in settings
    are relative to. device: auto, cpu or cuda, for metrics with a model.
    """

    predictions: Sequence[str]
    references: Sequence[Sequence[str]]
    language: str | None = None
    base: Path = Path()
    device: str = "cpu"


@dataclass(frozen=True)
class ClassSamples(Samples):
    """n predicted and gold classes; logits, float32 [n, C], where they are known."""

    predicted: Sequence[int]
    gold: Sequence[int]
    logits: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class LabelSetSamples(Samples):
    """Sets of labels, int64 [n, C], 1 where a label is in the set; logits as in `ClassSamples`."""

    predicted: NDArray[np.int64]
    gold: NDArray[np.int64]
    logits: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class NumberSamples(Samples):
    """n predicted and gold numbers, or n tuples of C numbers."""

    predicted: Sequence[float] | Sequence[Sequence[float]]
    gold: Sequence[float] | Sequence[Sequence[float]]


@dataclass(frozen=True)
class LossSamples(Samples):
    """Negative log-likelihoods, of n windows of running text or n responses.

    losses: sums over the tokens, nats. tokens, sizes: numbers of these tokens, and their UTF-8 bytes.
    settings: how the text was divided, for the signature. vocabulary: number of tokens.
    """

    losses: Sequence[float]
    tokens: Sequence[int]
    sizes: Sequence[int]
    settings: str
    vocabulary: int | None = None


class WindowSamples(LossSamples):
    """Windows of running text, whose tokens depend on each other: they are resampled as a whole."""


@dataclass(frozen=True)
class MaskedSamples(WindowSamples):
    """Windows of running text of which the masked tokens are predicted; correct: how many were right."""

    correct: Sequence[int] = ()


class ResponseSamples(LossSamples):
    """Reference responses, given their prompts."""


@dataclass(frozen=True)
class ChoiceSamples(Samples):
    """For each of n examples the negative log-likelihoods of its choices, nats, and the right choice."""

    losses: Sequence[Sequence[float]]
    choices: Sequence[Sequence[str]]
    answers: Sequence[int]


@dataclass(frozen=True)
class ComparedOutputs(Samples):
    """n texts, or classes, of a step and of its baseline; key: of the baseline's artifact."""

    outputs: Sequence[str | Sequence[str]]
    expected: Sequence[str | Sequence[str]]
    classes: bool
    key: str


@dataclass(frozen=True)
class ComparedVectors(Samples):
    """Vectors, float32 [n, D], of a step and of the artifact `key`."""

    vectors: NDArray[np.float32]
    expected: NDArray[np.float32]
    key: str


@dataclass(frozen=True)
class ComparedArrays(Samples):
    """For each of n samples the outputs of a graph, and of the graph `key`, by name.

    class_axes: the axis of the classes, from the last one, by output with scores of classes. inputs: by
    sample the arrays of the data that are read, by name.
    """

    outputs: Sequence[Outputs]
    expected: Sequence[Outputs]
    class_axes: Mapping[str, int]
    key: str
    inputs: Sequence[Outputs] = ()


@dataclass(frozen=True)
class ExampleRows:
    """What a metric stores of the examples that it scored.

    rows: [n, K]. signature: version and settings that the value depends on. value: as the reference library
    rounds it, where that differs in the last digits. chance: the value without a model, where it does not
    follow from the rows. unit: where it depends on the samples. count: of what is scored, if not examples.
    """

    rows: Rows
    signature: str
    value: float | None = None
    chance: float | None = None
    unit: str | None = None
    count: int | None = None


SamplesT = TypeVar("SamplesT", bound=Samples)


@dataclass(frozen=True, kw_only=True)
class Metric(Generic[SamplesT]):
    """A metric: its properties as fields, its formulas as methods.

    title: its name as papers write it. unit: of its value, in report.json and the tables. description: of the
    value, for the documentation.
    tasks: tasks, and problem types of classifiers, that it can be scored in; those of `optional` score it
    only where a recipe lists it, and in those of `main` it is the first one.
    kind: how the value follows from the rows: "proportion": a row is a prediction and its gold value, equal
    or not (Wilson, McNemar); "mean": the mean of the first column times `scale`; "sum": a function of sums,
    to which a row contributes a part; "corpus": another function of all rows.
    limits: the lowest and highest value, infinite where it has no limit.
    higher_is_better: where lower is better a gate's `max_degradation` limits the rise.
    digits: decimal places in reports.
    libraries: distributions whose versions the value depends on.
    settings: the class of its settings in `score.quality`; has_variants: whether a recipe may list it several
    times, with different ones.
    compares_with_baseline: whether it measures the change of outputs, so that the baseline's value is
    perfect. reads_file: whether it needs files or a model that a machine may lack.
    example_metric: whose value it has on a single example, if another metric's.
    """

    samples: ClassVar[tuple[type[Samples], ...]]
    """What `example_rows` scores."""
    n_unit: ClassVar[str] = "example"
    """What its `n` counts."""

    name: str
    title: str
    unit: str
    description: str
    tasks: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    main: tuple[str, ...] = ()
    kind: MetricKind = "corpus"
    limits: tuple[float, float] = (0.0, 100.0)
    scale: float = 100.0
    higher_is_better: bool = True
    digits: int = 2
    libraries: tuple[str, ...] = ()
    settings: type[Settings] | None = None
    has_variants: bool = False
    compares_with_baseline: bool = False
    reads_file: bool = False
    example_metric: str | None = None

    def example_rows(self, samples: SamplesT, settings: Mapping[str, Any]) -> ExampleRows | None:
        """Return the row of each example, and the signature; None if the samples cannot be scored by it.

        A user's function has its rows computed elsewhere (`smelt.evaluate.custom_metric`).
        """
        raise NotImplementedError(f"{self.name}: its rows are computed elsewhere")

    def value(self, rows: Array, weights: Array) -> Array:
        """Return the value on each resample: [n, K], [R, n] -> [R]."""
        if self.kind == "proportion":
            hits = (rows[:, 0] == rows[:, 1]).astype(np.float64)
            return np.asarray(100 * (weights @ hits) / weights.sum(1))
        if self.kind == "mean":
            return np.asarray(self.scale * (weights @ rows)[:, 0] / weights.sum(1))
        raise NotImplementedError(f"{self.name}: a metric of kind {self.kind} computes its own value")

    def example_values(self, rows: Array) -> Array | None:
        """Return the value on each example alone, [n]; None for a metric that has none, as a correlation."""
        if self.kind == "proportion":
            return np.asarray(100.0 * (rows[:, 0] == rows[:, 1]))
        return np.asarray(self.scale * rows[:, 0]) if self.kind == "mean" else None

    def changed_values(self, rows: Array) -> Array | None:
        """Return the values after one prediction changed, [changes]; None where a change has no limit."""
        return None

    def chance_level(self, rows: Rows) -> float | None:
        """Return the value without a model, on the same examples; None if there is no such value."""
        return None

    def parts(self, rows: Rows) -> dict[str, float]:
        """Return the numbers that the value is computed from, by name; empty for most metrics."""
        return {}

    def value_limits(self, signature: str) -> tuple[float, float]:
        """Return the lowest and highest value of a score with this signature."""
        return self.limits

    def effective_examples(self, rows: Array) -> float:
        """Return how many examples of one weight are as good."""
        return len(rows)

    def check(self, settings: Mapping[str, Any], base: Path, splits: Mapping[str, Split]) -> None:
        """Check what the metric needs: data, files, packages.

        Args:
            settings: as in the recipe.
            base: the folder that paths in settings are relative to.
            splits: data to score, by name.

        Raises:
            InputError: an input does not fit.
            MissingDependencyError: a package or its data are missing.
        """

    def check_graph(self, settings: Mapping[str, Any], outputs: OutputShapes) -> None:
        """Check that the settings match the outputs of a third-party graph.

        Raises:
            InputError: an output is missing, or has no such axis.
        """

    def data_arrays(self, settings: Mapping[str, Any]) -> frozenset[str]:
        """Return the arrays of the data that the metric reads, besides the graph's inputs."""
        return frozenset()

    def describe(
        self, settings: Mapping[str, Any], references: Sequence[str] | None, language: str | None
    ) -> str:
        """Return the name, with what `smelt plan` shows of how the metric is computed.

        Args:
            settings: as in the recipe.
            references: of the test samples; None if these are no texts, or were not read.
            language: of the references, an ISO 639 code, where it is known.
        """
        return self.name

    def fingerprint(self, settings: Mapping[str, Any], base: Path) -> str | None:
        """Return a hash of files that the value depends on; None if there are none."""
        return None


class TextMetric(Metric[TextSamples]):
    """A metric of generated texts."""

    samples = (TextSamples,)

    def chance_level(self, rows: Rows) -> float | None:
        """Return the value of empty texts."""
        return 0.0


def require_graph_outputs(metric: str, setting: str, names: Iterable[str], outputs: OutputShapes) -> None:
    """Require that a graph has the outputs `names` of a metric's setting.

    Raises:
        InputError: `unknown-output`.
    """
    for name in names:
        if name not in outputs:
            raise InputError(
                f"{metric}: '{name[:80]}' is no output of the graph; outputs: {', '.join(outputs)}."
                f"{did_you_mean(name, outputs)}",
                code="unknown-output",
                setting=setting,
            )


def most_frequent_gold(rows: Rows, width: int) -> Rows:
    """Return rows with the most frequent gold value, columns `width` to 2 `width`, as each prediction."""
    [(frequent, _)] = Counter(tuple(row[width : 2 * width]) for row in rows).most_common(1)
    return [[*frequent, *row[width:]] for row in rows]


def value_on_all(metric: Metric[Any], rows: Sequence[Sequence[int | float]]) -> float:
    """Return the value on all examples, in the metric's unit (most: 0-100)."""
    array = np.asarray(rows, dtype=np.float64)
    return float(metric.value(array, np.ones((1, len(array))))[0])


def safe_ratio(above: Array, below: Array) -> Array:
    """Return 100 times the ratio, 0 where `below` is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, 100 * above / below, 0.0)
