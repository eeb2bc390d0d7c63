"""Check, in a subprocess with limits, whether outputs of a sample depend on the other samples of its call.

Causes are an `If` on a sum over the batch, or batch norm in training mode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smelt.core.messages import Message, warning
from smelt.data.npz_arrays import SampleArrays
from smelt.runtimes.third_party.isolated_process import IsolatedProcessError, run_isolated
from smelt.runtimes.third_party.signature import GraphSignature
from smelt.runtimes.third_party.trial_run import read_feeds, trial_limits, write_feeds

# Samples run together: for an `If` on their sum, 1 in 128 draws of 8 takes the same branch for all.
COMPARED_SAMPLES = 8
_WARN_DIFFERENCE = 1e-2  # of an output's standard deviation, root mean square
_ROUNDING_DIFFERENCE = 2e-3  # of the output's magnitude; fp16 outputs with a large mean deviate by as much
_OTHERS = 0.25  # fraction of the integers: a choice between equal values may differ
_DYNAMIC_QUANTIZE_PREFIX = "DynamicQuantize"  # rounding in these depends on all samples of a call by design


def batch_dependence_warnings(
    graph: Path, signature: GraphSignature, rows: SampleArrays, details: Mapping[str, Any]
) -> list[Message]:
    """Return a warning of the outputs of a sample that depend on the other samples of its call.

    Graphs that draw random numbers, that quantize dynamically, whose batch is fixed, or that cannot be run on
    several samples are not checked.

    Args:
        graph: its file.
        signature: its inputs and outputs, with the axes of the samples.
        rows: samples, of which the first are run together and one by one.
        details: of the graph: its operators, those that draw random numbers.
    """
    operators = [*details.get("operators", {}), *details.get("inner_operators", {})]
    rounds_by_call = any(name.startswith(_DYNAMIC_QUANTIZE_PREFIX) for name in operators)
    if (
        signature.fixed_batch_size is not None
        or details.get("random")
        or rounds_by_call
        or rows.num_samples < 2
    ):
        return []
    found = _compare_isolated(
        graph, signature, signature.make_feeds(rows, 0, min(COMPARED_SAMPLES, rows.num_samples))
    )
    if not found:
        return []
    names = ", ".join(f"'{name}' ({how})" for name, how in found.items())
    return [
        warning(
            "outputs-depend-on-batch",
            "Outputs of a sample depend on the other samples of the batch, so scores and predictions do"
            f" too: {names}, comparing {min(COMPARED_SAMPLES, rows.num_samples)} samples run together and"
            " one by one. Set batch size 1 (score: {batch_size: 1} in a recipe, --batch-size 1 of a"
            " command), or export the model in inference mode (model.eval()).",
        )
    ]


def _compare_isolated(
    graph: Path, signature: GraphSignature, feeds: Mapping[str, NDArray[Any]]
) -> dict[str, str]:
    with TemporaryDirectory(prefix="smelt-") as folder:
        axes = {value.name: value.axis for value in (*signature.inputs, *signature.outputs)}
        arguments = [str(graph), *write_feeds(Path(folder), feeds), json.dumps(axes)]
        try:
            found: dict[str, str] = run_isolated(__name__, arguments, trial_limits(graph, dict(feeds)))
        except IsolatedProcessError:  # resource needs of several samples do not matter in this first check
            return {}
    return found


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
        alone = []
        for at in range(count):
            sample = {
                n: v if axes[n] is None or not v.ndim else v.take([at], axes[n]) for n, v in feeds.items()
            }
            alone.append(dict(zip(outputs, session.run(None, sample), strict=True)))
    except MemoryError:
        raise
    except Exception:  # ONNX Runtime's share no other base class; a failure is reported elsewhere
        return {}
    found = {
        name: _difference_message(
            together[name], [outputs_alone[name] for outputs_alone in alone], axes.get(name)
        )
        for name in outputs
    }
    return {name: how for name, how in found.items() if how is not None}


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
    both = np.isfinite(together) & np.isfinite(separate)
    odd = float(np.mean(np.isfinite(together) != np.isfinite(separate)))
    if odd >= _OTHERS:
        return f"{100 * odd:.0f} % of its values are finite in only one of the two"
    if not both.any():
        return None
    a, b = together[both], separate[both]
    off, size, spread = (float(np.sqrt(np.mean(v**2))) for v in (a - b, b, b - b.mean()))
    if off <= max(_WARN_DIFFERENCE * spread, _ROUNDING_DIFFERENCE * size):
        return None
    return f"{off / (spread or size or 1.0):.2g} of its standard deviation"
