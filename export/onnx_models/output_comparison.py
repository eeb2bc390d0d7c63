"""Compare the outputs of a quantized graph with the float graph's, and reject large errors.

Outputs of a graph that are its inputs are removed before and restored afterwards: ONNX Runtime's quantizer
cannot sort a graph with them. Whether outputs of a sample depend on the other samples of its call is checked
in a subprocess with limits. Causes are an `If` on a sum over the batch, or batch norm in training mode.

Shapes: R = rows of a call, K = classes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.errors import ParityError
from smelt.core.messages import Message, warning
from smelt.core.system import IsolatedProcessError, run_isolated
from smelt.core.workspaces import temporary_workspace
from smelt.data.npz_arrays import NO_SAMPLE_AXES, SampleArrays, SampleAxes
from smelt.export.batch_dependence import DYNAMIC_QUANTIZE_PREFIX
from smelt.export.onnx_models.graph_samples import (
    Feeds,
    batch_size_of,
    count_changed,
    max_output_difference,
    record_difference,
)
from smelt.runtimes.onnx_import.signature import GraphSignature
from smelt.runtimes.onnx_import.trial_run import read_feeds, trial_limits, write_feeds
from smelt.stage import Context

_MAX_COMPARED = 64  # samples on which the quantized graph is compared with the float one
_LARGE_DIFFERENCE = 0.5  # fraction of the limit above which an error is reported as a warning
_Z_95 = 1.96  # standard errors
_MIN_KAPPA = 0.25  # share of the way from chance to full agreement
_MAX_CLASS_SHARE = 0.9  # chance agreement above which nearly all samples have one class
# As a fraction of the range of a sample's values: two values that are closer are the same choice, such as 1
# and 0.999 of a sigmoid, or two peaks of a wave.
_TIE = 0.05
_CLASS_OUTPUT_NAMES = ("logits", "scores", "probabilities", "label", "output_label", "output_probability")
_MANY_CLASSES = 0.25  # distinct integers, as a fraction of the samples, above which they are not classes


@dataclass
class OutputDifference:
    """The accumulated differences of one output.

    squares: of the differences. hits: samples with the class that the float graph chooses. near: those, and
    samples whose class has nearly the largest value in the float graph. classes: how often the float graph
    chooses each. mismatches: values that are finite in only one graph, or outputs of another shape.
    """

    count: int = 0
    squares: float = 0.0
    total: float = 0.0
    total_squares: float = 0.0
    mismatches: int = 0
    chosen: int = 0
    hits: int = 0
    near: int = 0
    classes: Counter[Any] = field(default_factory=Counter)

    @property
    def relative_rmse(self) -> float:
        """The root mean square of the differences, in standard deviations of the float graph's values.

        A value that is finite in only one graph counts as one standard deviation.
        """
        if not self.count:
            return 1.0 if self.mismatches else 0.0
        variance = max(0.0, self.total_squares / self.count - (self.total / self.count) ** 2)
        scale = (
            variance
            if variance > 1e-12 * self.total_squares / self.count
            else self.total_squares / self.count
        )
        share = self.squares / self.count / (scale or 1.0)
        return sqrt((share * self.count + self.mismatches) / (self.count + self.mismatches))

    @property
    def top1_agreement(self) -> float | None:
        """The fraction of samples with the same class, 0 to 1; None if the output is not a class."""
        if not self.chosen or self._integers_not_classes():
            return None
        return self.hits / self.chosen

    def agrees_at_chance(self) -> bool:
        """Whether the agreement is significantly below chance plus a quarter of the rest.

        Chance is the agreement of two independent graphs that choose each class as often as the float graph
        (as in Cohen's kappa, 1960). The upper end of Wilson's interval is compared. A class that has nearly
        the largest value in the float graph counts as agreement.
        """
        if self.top1_agreement is None:
            return False
        chance_agreement = sum((times / self.chosen) ** 2 for times in self.classes.values())
        floor = chance_agreement + _MIN_KAPPA * (1 - chance_agreement)
        return (
            chance_agreement < _MAX_CLASS_SHARE
            and _wilson_upper(self.near / self.chosen, self.chosen) < floor
        )

    def _integers_not_classes(self) -> bool:
        return len(self.classes) > max(2, _MANY_CLASSES * self.chosen) and not self.count

    def add(self, got: NDArray[Any], wanted: NDArray[Any], classes: bool) -> None:
        """Add one call: both arrays [R, ...]; classes: whether the output's last axis are classes."""
        if got.shape != wanted.shape:
            self.mismatches += max(1, wanted.size)
            return
        if wanted.dtype.kind != "f":
            self._add_classes(got.ravel(), wanted.ravel())
            self.near = self.hits
            return
        if classes and wanted.ndim > 1 and wanted.shape[-1] > 1:
            self._add_classes(got.argmax(-1).ravel(), wanted.argmax(-1).ravel())
            self.near += _count_near_max(wanted, got.argmax(-1))
        got_finite, wanted_finite = np.isfinite(got), np.isfinite(wanted)
        both_finite = got_finite & wanted_finite
        same_non_finite = (
            ~got_finite & ~wanted_finite & ((got == wanted) | (np.isnan(got) & np.isnan(wanted)))
        )
        self.mismatches += int((~both_finite & ~same_non_finite).sum())
        a, b = got[both_finite].astype(np.float64), wanted[both_finite].astype(np.float64)
        self.count += a.size
        self.squares += float(((a - b) ** 2).sum())
        self.total += float(b.sum())
        self.total_squares += float((b**2).sum())

    def _add_classes(self, got: NDArray[Any], wanted: NDArray[Any]) -> None:
        self.chosen += wanted.size
        self.hits += int((got == wanted).sum())
        self.classes.update(wanted.tolist())


class OutputComparison:
    """Compare two graphs call by call, so that only one call's outputs are in memory."""

    def __init__(self, axes: SampleAxes = NO_SAMPLE_AXES) -> None:
        """axes: the sample axis of an input, if it is not the first."""
        self.axes = axes
        self.outputs: dict[str, OutputDifference] = {}
        self.rows = 0
        self._largest = 0.0
        self._changed = self._whole = 0

    def add(self, feeds: Feeds, got: Feeds, wanted: Feeds) -> None:
        """Add the outputs of one call."""
        self.rows += batch_size_of(feeds, self.axes)
        got, wanted = _without_padding(feeds, got, wanted)
        self._largest = max(self._largest, max_output_difference([got], [wanted], exact=False))
        num_changed, num_compared = count_changed([got], [wanted])
        self._changed, self._whole = self._changed + num_changed, self._whole + num_compared
        for name, value in wanted.items():
            classes = (
                value.ndim == 2 or name in _CLASS_OUTPUT_NAMES
            )  # per sample, or per token if the name ends so
            self.outputs.setdefault(name, OutputDifference()).add(got[name], value, classes)

    def exceeding(self, limit: float, judge_classes: bool) -> Iterator[tuple[str, str]]:
        """Yield the outputs that exceed the limit, each with the size of the difference."""
        for name, output in self.outputs.items():
            if output.relative_rmse > limit:
                yield name, f"{output.relative_rmse:.2g} of its standard deviation (limit {limit:g})"
            elif judge_classes and output.agrees_at_chance():
                yield (
                    name,
                    f"the same class in only {100 * (output.top1_agreement or 0):.0f} % of"
                    f" {output.chosen:,} samples",
                )

    def record(self, ctx: Context) -> None:
        """Write the worst of all outputs into the details, and warn if it is large."""
        record_difference(ctx, self.rows, self._largest, self._changed / (self._whole or 1))
        top1 = [
            output.top1_agreement for output in self.outputs.values() if output.top1_agreement is not None
        ]
        error = max((output.relative_rmse for output in self.outputs.values()), default=0.0)
        ctx.details["parity"] |= {"error": error, "top1": min(top1, default=None)}


def compare_graphs(
    comparison: OutputComparison, new: Path, old: Path, feeds: list[Any], threads: int | None
) -> None:
    """Run both graphs on up to `_MAX_COMPARED` samples, spread over `feeds`."""
    from smelt.export.onnx_models.graph_samples import iter_graph_outputs

    samples = _select_samples(feeds, comparison.axes)
    pairs = zip(
        iter_graph_outputs(new, samples, threads),
        iter_graph_outputs(old, samples, threads),
        strict=True,
    )
    for inputs, (quantized_outputs, float_outputs) in zip(samples, pairs, strict=True):
        comparison.add(inputs, quantized_outputs, float_outputs)


def measure_noise(noise: OutputComparison, path: Path, feeds: list[Any], threads: int | None) -> None:
    """Run the float graph twice on the samples of `compare_graphs`; outputs that are random differ."""
    from smelt.export.onnx_models.graph_samples import iter_graph_outputs

    samples = _select_samples(feeds, noise.axes)
    repeated_outputs = iter_graph_outputs(
        path, [repeated for inputs in samples for repeated in (inputs, inputs)], threads
    )
    for inputs in samples:
        noise.add(inputs, next(repeated_outputs), next(repeated_outputs))


def _select_samples(feeds: list[Any], axes: SampleAxes) -> list[Any]:
    from smelt.export.onnx_models.graph_samples import batch_size_of

    calls = max(1, _MAX_COMPARED // batch_size_of(feeds[0], axes))
    return feeds[:: max(1, -(-len(feeds) // calls))]


def require_close(
    comparison: OutputComparison,
    limit: float,
    judge_classes: bool,
    advice: str,
    ctx: Context,
    noise: OutputComparison | None,
) -> None:
    """Require that no output differs by more than `limit`, in its standard deviations.

    Args:
        comparison: the quantized graph compared with the float one.
        limit: largest root mean square difference.
        judge_classes: whether outputs that choose a class must agree more often than by chance.
        advice: what the user can do.
        ctx: gets a warning if the float graph differs from itself as much.
        noise: the float graph compared with itself, for outputs that are random.

    Raises:
        ParityError: `quantization-error`.
    """
    wrong = dict(comparison.exceeding(limit, judge_classes))
    random = {} if noise is None else dict(noise.exceeding(limit, judge_classes))
    for name in wrong.keys() & random.keys():
        ctx.warn(
            "random-outputs",
            f"Output '{name}' is not compared, because the float graph returns different values in each call:"
            f" {random[name]}. Remove its random nodes to compare it.",
        )
        del wrong[name]
    for name, output in comparison.outputs.items():
        if name not in {*wrong, *random} and output.relative_rmse > limit * _LARGE_DIFFERENCE:
            ctx.warn(
                "large-quantization-error",
                f"Output '{name}' differs from the float graph by {output.relative_rmse:.2g} of its standard"
                f" deviation (limit {limit:g}). {advice}",
            )
    if not wrong:
        return
    difference_texts = "; ".join(
        f"output '{name}': {difference}" for name, difference in list(wrong.items())[:3]
    )
    more_text = f", and {len(wrong) - 3} more outputs" if len(wrong) > 3 else ""
    raise ParityError(
        f"The quantized graph differs too much from the float one on {comparison.rows} samples:"
        f" {difference_texts}{more_text}. {advice} To accept this difference, increase max_difference.",
        code="quantization-error",
    )


def _without_padding(feeds: Feeds, *outputs: Feeds) -> Iterator[Feeds]:
    """Yield outputs without the values at padding, which are not used: [R, T, ...] -> [1, n, ...]."""
    mask = feeds.get("attention_mask")
    for call_outputs in outputs:
        if mask is None or mask.ndim != 2:
            yield call_outputs
            continue
        yield {
            name: value[mask == 1][None] if value.ndim > 2 and value.shape[:2] == mask.shape else value
            for name, value in call_outputs.items()
        }


def _count_near_max(values: NDArray[Any], chosen: NDArray[Any]) -> int:
    """Return in how many rows the value at index `chosen` is the largest of the last axis, or nearly."""
    highest, lowest = values.max(-1), values.min(-1)
    value = np.take_along_axis(values, chosen[..., None], -1)[..., 0]
    is_argmax = chosen == values.argmax(-1)  # also if the range is infinite
    with np.errstate(invalid="ignore"):
        return int((is_argmax | (value >= highest - _TIE * (highest - lowest))).sum())


def _wilson_upper(share: float, n: int) -> float:
    """Return the upper end of the 95 % Wilson score interval (Wilson 1927)."""
    z_term = _Z_95**2 / n
    half = _Z_95 * sqrt(share * (1 - share) / n + z_term / (4 * n))
    return (share + z_term / 2 + half) / (1 + z_term)


PassthroughOutputs = list[tuple[int, Any]]


def remove_passthrough_outputs(path: Path, folder: Path) -> tuple[Path, PassthroughOutputs]:
    """Return the graph in `path`, or a copy in `folder` without outputs that are inputs, and these.

    Returns:
        The file, and for each removed output its index and onnx.ValueInfoProto. If a graph has no other
        outputs, none are removed.
    """
    from smelt.export.graph_files import read_graph, write_graph

    def passed_in(model: Any) -> PassthroughOutputs:
        input_names = {value.name for value in model.graph.input}
        return [
            (output_index, value)
            for output_index, value in enumerate(model.graph.output)
            if value.name in input_names
        ]

    structure = read_graph(path, values=False)
    if not passed_in(structure) or len(passed_in(structure)) == len(structure.graph.output):
        return path, []
    model = read_graph(path)
    passed = passed_in(model)
    kept_outputs = [
        value for value in model.graph.output if value.name not in {output.name for _, output in passed}
    ]
    passed = [(output_index, _copy_value(value)) for output_index, value in passed]
    kept_outputs = [_copy_value(value) for value in kept_outputs]
    del model.graph.output[:]
    model.graph.output.extend(kept_outputs)
    folder.mkdir(exist_ok=True)
    write_graph(model, folder / path.name)
    return folder / path.name, passed


def restore_passthrough_outputs(model: Any, passed: PassthroughOutputs) -> Any:
    """Return the model with the removed outputs at their original indices."""
    for output_index, value in passed:
        model.graph.output.insert(output_index, value)
    return model


def _copy_value(value: Any) -> Any:
    from onnx import ValueInfoProto

    copy = ValueInfoProto()
    copy.CopyFrom(value)
    return copy


# Samples run together: for an `If` on their sum, 1 in 128 draws of 8 takes the same branch for all.
COMPARED_SAMPLES = 8
_WARN_DIFFERENCE = 1e-2  # of an output's standard deviation, root mean square
_ROUNDING_DIFFERENCE = 2e-3  # of the output's magnitude; fp16 outputs with a large mean deviate by as much
_OTHERS = 0.25  # fraction of the integers: a choice between equal values may differ


def batch_dependence_warnings(
    graph: Path, signature: GraphSignature, samples: SampleArrays, details: Mapping[str, Any]
) -> list[Message]:
    """Return a warning of the outputs of a sample that depend on the other samples of its call.

    Graphs that draw random numbers, that quantize dynamically, whose batch is fixed, or that cannot be run on
    several samples are not checked.

    Args:
        graph: its file.
        signature: its inputs and outputs, with the axes of the samples.
        samples: samples, of which the first are run together and one by one.
        details: of the graph: its operators, those that draw random numbers.
    """
    operators = [*details.get("operators", {}), *details.get("inner_operators", {})]
    rounds_by_call = any(name.startswith(DYNAMIC_QUANTIZE_PREFIX) for name in operators)
    if (
        signature.fixed_batch_size is not None
        or details.get("random")
        or rounds_by_call
        or samples.max_batch_size == 1
        or samples.num_samples < 2
    ):
        return []
    differences = _compare_isolated(
        graph, signature, signature.make_feeds(samples, 0, min(COMPARED_SAMPLES, samples.num_samples))
    )
    if not differences:
        return []
    names = ", ".join(f"'{name}' ({difference})" for name, difference in differences.items())
    return [
        warning(
            "outputs-depend-on-batch",
            "Outputs of a sample depend on the other samples of the batch, so scores and predictions do"
            f" too: {names}, comparing {min(COMPARED_SAMPLES, samples.num_samples)} samples run together and"
            " one by one. Set batch size 1 (score: {batch_size: 1} in a recipe, --batch-size 1 of a"
            " command), or export the model in inference mode (model.eval()).",
        )
    ]


def _compare_isolated(
    graph: Path, signature: GraphSignature, feeds: Mapping[str, NDArray[Any]]
) -> dict[str, str]:
    with temporary_workspace() as folder:
        axes = {value.name: value.axis for value in (*signature.inputs, *signature.outputs)}
        arguments = [str(graph), *write_feeds(Path(folder), feeds), json.dumps(axes)]
        try:
            differences: dict[str, str] = run_isolated(__name__, arguments, trial_limits(graph, dict(feeds)))
        except IsolatedProcessError:  # resource needs of several samples do not matter in this first check
            return {}
    return differences


def subprocess_main(arguments: Sequence[str]) -> dict[str, str]:
    """Return the outputs that depend on the samples of a call, each with the size of the difference.

    arguments: the graph's file, that of the samples, the names of its inputs and the axes of all, as JSON.
    """
    from smelt.runtimes.onnx_session import open_onnx_session

    feeds, axes = read_feeds(*arguments[1:3]), json.loads(arguments[3])
    count = next(v.shape[axes[n]] for n, v in feeds.items() if v.ndim and axes[n] is not None)
    try:
        session = open_onnx_session(Path(arguments[0]), threads=1)
        outputs = [output.name for output in session.get_outputs()]
        together = dict(zip(outputs, session.run(None, feeds), strict=True))
        isolated_outputs = []
        for row_index in range(count):
            sample = {
                n: v if axes[n] is None or not v.ndim else v.take([row_index], axes[n])
                for n, v in feeds.items()
            }
            isolated_outputs.append(dict(zip(outputs, session.run(None, sample), strict=True)))
    except MemoryError:
        raise
    except Exception:  # ONNX Runtime's share no other base class; a failure is reported elsewhere
        return {}
    differences = {
        name: _difference_message(
            together[name], [outputs_alone[name] for outputs_alone in isolated_outputs], axes.get(name)
        )
        for name in outputs
    }
    return {name: difference for name, difference in differences.items() if difference is not None}


def _difference_message(
    together: NDArray[Any], alone: Sequence[NDArray[Any]], axis: int | None
) -> str | None:
    """Return how far samples run alone differ; None if they do not, or if it cannot be measured."""
    if axis is None or any(output.ndim <= axis or output.shape[axis] != 1 for output in alone):
        return None
    try:
        separate = np.concatenate(alone, axis)
    except ValueError:  # of other sizes
        return None
    if separate.shape != together.shape or not separate.size:
        return None
    if together.dtype.kind != "f":
        share = float(np.mean(together != separate))
        return f"{100 * share:.0f} % of its values differ" if share >= _OTHERS else None
    return _relative_difference(together.astype(np.float64), separate.astype(np.float64))


def _relative_difference(together: NDArray[Any], separate: NDArray[Any]) -> str | None:
    both_finite = np.isfinite(together) & np.isfinite(separate)
    mismatch_share = float(np.mean(np.isfinite(together) != np.isfinite(separate)))
    if mismatch_share >= _OTHERS:
        return f"{100 * mismatch_share:.0f} % of its values are finite in only one of the two"
    if not both_finite.any():
        return None
    a, b = together[both_finite], separate[both_finite]
    off, size, std = (float(np.sqrt(np.mean(v**2))) for v in (a - b, b, b - b.mean()))
    if off <= max(_WARN_DIFFERENCE * std, _ROUNDING_DIFFERENCE * size):
        return None
    return f"{off / (std or size or 1.0):.2g} of its standard deviation"
