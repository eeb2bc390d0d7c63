"""Run artifacts of the task `custom` on samples of `.npz` files; outputs are arrays."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact, read_artifact
from smelt.core.errors import InputError, RunError, combined_error
from smelt.core.messages import error_message
from smelt.core.workspaces import workspace
from smelt.data.npz_arrays import (
    NPZ_SUFFIX,
    ArrayHeader,
    CallArrays,
    SampleArrays,
    are_calls,
    call_arrays,
    call_files,
    count_array_samples,
    dtype_name,
    read_npz_headers,
    samples_first,
    write_npz,
)
from smelt.data.splits import Columns as _Columns
from smelt.data.splits import Split
from smelt.data.tasks import task_traits, tasks_with
from smelt.evaluate.metrics.metric import MetricSettingValues
from smelt.evaluate.tensor_quality import metric_arrays
from smelt.runtimes.onnx_import.signature import GraphSignature, read_signature
from smelt.runtimes.single_call_runners import GraphRunner, output_batch_axis, outputs_by_sample, run_batches
from smelt.tasks.read_split import read_split

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from smelt.runtimes.single_call_runners import GraphRunner


def reads_arrays(folder: Path) -> bool:
    """Return whether the artifact in `folder` has arrays as inputs (task `custom`)."""
    return task_traits(read_artifact(folder).manifest.task).modality == "arrays"


def read_array_rows(
    path: Path | None,
    artifact: Artifact,
    metrics: Sequence[str] = (),
    metric_settings: MetricSettingValues = MappingProxyType({}),
) -> Split:
    """Return the samples in `path`, an `.npz` file or a folder of them, for `artifact`.

    Args:
        path: of the samples.
        artifact: whose inputs are read.
        metrics: whose arrays are read, too.
        metric_settings: by metric.

    Raises:
        InputError: `path` is None, or the file does not contain the graph's inputs or a metric's arrays.
    """
    signature = read_signature(artifact.path)
    if path is None:
        names = ", ".join(f"{value.name}=..." for value in signature.inputs)
        raise InputError(
            "the inputs of this artifact are arrays. Set --data FILE.npz, written with"
            f" numpy.savez(FILE, {names}).",
            code="missing-data",
        )
    axes = signature.input_batch_axes
    if path.is_dir():
        axes = signature.without_batch_axes.input_batch_axes
    has_calls = are_calls(path, axes)
    files = call_files(path) if has_calls else [path]
    more = metric_arrays(metrics, metric_settings, files, axes)
    for file in files:
        shapes = read_npz_headers(file)
        require_matching_shapes(signature, shapes, str(file), more)
    axes = {**dict.fromkeys(more, None if has_calls else 0), **axes}
    if not has_calls:
        count_array_samples({name: shapes[name] for name in axes}, path, axes, of_artifact=True)
    (task,) = tasks_with(modality="arrays")
    return read_split(str(path), task, _Columns(), Path.cwd(), axes=axes)


def require_matching_shapes(
    signature: GraphSignature,
    shapes: Mapping[str, ArrayHeader],
    origin: str,
    metric_arrays: Collection[str] = (),
) -> None:
    """Require that arrays of these shapes fit the graph's inputs, and that there are those of metrics.

    Raises:
        InputError: they do not; the message lists every mismatch.
    """
    missing = sorted({*metric_arrays} - {*shapes})
    texts = [
        *signature.shape_problems(shapes),
        *(
            f"no array '{name}', which a metric reads. Add it, or correct its name in the metric."
            for name in missing
        ),
    ]
    problems = [error_message("does-not-fit-graph", f"{origin}: {text}") for text in texts]
    if problems:
        raise combined_error(problems)


def run_in_batches(runner: GraphRunner, arrays: SampleArrays, batch_size: int) -> dict[str, NDArray[Any]]:
    """Run the graph in batches and return the concatenated outputs of all samples.

    An output without a batch axis, with one sample per call, gets a new axis 0.

    Raises:
        RunError: the graph fails, output sizes differ between batches, or an output of a batch of several
            samples has no batch axis (`unclear-rows`).
    """
    batches = list(run_batches(runner, arrays, batch_size))
    if len(batches) == 1:
        return batches[0][1]
    axes = {
        name: [output_batch_axis(runner, name, outputs[name], batch_rows) for batch_rows, outputs in batches]
        for name in batches[0][1]
    }
    return {name: _concatenate(name, [p[name] for _, p in batches], axes[name]) for name in axes}


def _concatenate(name: str, parts: Sequence[NDArray[Any]], axes: Sequence[int | None]) -> NDArray[Any]:
    """Return the parts of an output concatenated on the batch axis, or stacked on a new one."""
    import numpy as np

    first_part = parts[0]
    axis = None if None in axes else axes[0]
    shapes = {part.shape if axis is None else part.shape[:axis] + part.shape[axis + 1 :] for part in parts}
    if len(shapes) > 1:
        other_part = next(part for part in parts if part.shape != first_part.shape)
        raise RunError(
            f"the output '{name}' has shape {list(first_part.shape)} for some samples and"
            f" {list(other_part.shape)} for others, so the outputs cannot be concatenated. Pass fewer samples"
            " per call, use a larger batch size, or `smelt predict` without --out.",
            code="shape-mismatch",
        )
    return np.stack(parts) if axis is None else np.concatenate(parts, axis)


def as_arrays(samples: Any, signature: GraphSignature) -> SampleArrays:
    """Return the arrays of a Python call as samples of the graph's inputs.

    Raises:
        InputError: `samples` is not a mapping of names to arrays, or does not fit the graph.
    """
    import numpy as np

    if not isinstance(samples, Mapping):
        names = ", ".join(f"'{value.name}'" for value in signature.inputs)
        raise InputError(
            f"expected a mapping of input names ({names}) to arrays, got {type(samples).__name__}.",
            code="wrong-value",
        )
    try:
        values = {str(name): np.asarray(value) for name, value in samples.items()}
    except ValueError as error:  # nested lists of different lengths
        raise InputError(f"an input cannot be converted to an array: {error}", code="wrong-type") from error
    shapes = {name: ArrayHeader(dtype_name(value.dtype), value.shape) for name, value in values.items()}
    axes = signature.input_batch_axes
    if all(axis is None for axis in axes.values()):
        require_matching_shapes(signature, shapes, "arrays")
        return call_arrays([{name: value for name, value in values.items() if name in axes}], ["arrays"])
    if not any(value.ndim and value.size for value in values.values()):
        sizes = sorted(len(value) for value in values.values() if value.ndim)
        raise InputError(
            f"all arrays need the same number of samples, at least one; got {sizes}.", code="unequal-rows"
        )
    require_matching_shapes(signature, shapes, "arrays")
    input_values = {name: value for name, value in values.items() if name in axes}
    return samples_first(
        input_values,
        count_array_samples({name: shapes[name] for name in input_values}, "arrays", axes, of_artifact=True),
        axes,
    )


@contextlib.contextmanager
def _open_graph(
    folder: Path, data: Path | None, threads: int | None, device: str
) -> Iterator[tuple[GraphRunner, SampleArrays]]:
    """Yield a runner of the artifact in `folder`, and the samples in `data`."""
    from smelt.runtimes.onnx_import.trial_run import require_safe_artifact
    from smelt.runtimes.registry import open_runner

    artifact = read_artifact(folder)
    artifact.verify()
    require_safe_artifact(artifact)
    samples = read_array_rows(data, artifact).arrays
    assert samples is not None
    with open_runner(artifact, threads, device) as runner:
        assert isinstance(runner, GraphRunner)
        yield runner, samples


def predict_to_file(
    folder: Path, data: Path, out: Path, threads: int | None, device: str, batch_size: int
) -> int:
    """Write the graph's outputs for all samples of `data` to `out`; return their number.

    `out` is an `.npz` file; where `data` is a folder with a file for each sample, a new folder of such files.

    Raises:
        InputError: `folder` is not an artifact, the samples do not fit it, or `out` is not `.npz` or exists.
    """
    if (out.suffix != NPZ_SUFFIX) != data.is_dir():
        kind = "a folder, as --data is" if data.is_dir() else f"a file name that ends with {NPZ_SUFFIX}"
        raise InputError(
            f"--out {out}: expected {kind}, because the outputs are arrays.",
            code="wrong-format",
        )
    if out.exists():
        raise InputError(
            f"--out {out}: the file exists. Choose another name, or remove it.", code="out-exists"
        )
    if not out.absolute().parent.is_dir():
        raise InputError(
            f"--out {out}: the folder {out.parent} does not exist. Create it.", code="missing-folder"
        )
    with _open_graph(folder, data, threads, device) as (runner, samples):
        if data.is_dir():
            _write_calls(runner, samples, out)
        else:
            write_npz(out, run_in_batches(runner, samples, batch_size))
    return samples.num_samples


def _write_calls(runner: GraphRunner, samples: SampleArrays, out: Path) -> None:
    """Write the outputs of each sample to a file of its name in the new folder `out`."""
    assert isinstance(samples, CallArrays)
    with workspace(out.absolute().parent) as unfinished:
        for name, (_, outputs) in zip(samples.names, run_batches(runner, samples, 1), strict=True):
            write_npz(unfinished / f"{name}{NPZ_SUFFIX}", outputs)
        unfinished.rename(out)


def prediction_lines(
    folder: Path,
    data: Path | None,
    as_json: bool,
    threads: int | None,
    device: str,
    batch_size: int,
    texts: bool = False,
) -> Iterator[str]:
    """Yield the graph's outputs for each sample of `data` as a line of JSON.

    texts: whether texts or columns were passed, which is an error.

    Raises:
        InputError: `folder` is not an artifact, or the samples do not fit it.
    """
    with _open_graph(folder, None if texts else data, threads, device) as (runner, samples):
        predictions = outputs_by_sample(runner, samples, batch_size)
    for row_number, outputs in enumerate(predictions, start=1):
        fields = {name: value.tolist() for name, value in outputs.items()}
        yield json.dumps({"row": row_number, "outputs": fields} if as_json else fields, ensure_ascii=False)
