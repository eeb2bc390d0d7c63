"""Compare the latency of artifacts on the same texts (`smelt bench`)."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.api.array_models import read_array_rows
from smelt.core.artifact import Artifact, read_artifact
from smelt.core.errors import InputError
from smelt.core.messages import count_text, messages_to_json
from smelt.data.npz_arrays import are_calls
from smelt.data.splits import Example
from smelt.data.tasks import task_traits
from smelt.runtimes.onnx_import.signature import read_signature
from smelt.runtimes.onnx_import.trial_run import require_safe_artifact
from smelt.stage import Progress, no_progress
from smelt.tasks.registry import task_spec

if TYPE_CHECKING:
    from smelt.evaluate.latency import LatencySettings


_WIDTH = 80
DISTURBED_MARK = "?"  # after a speed-up whose measurement was disturbed
# Headings of the parts of a call; "to first" and "each more" are tokens.
_PART_HEADINGS = {
    "tokenizing_ms": "tokenizing",
    "encoding_ms": "encoding",
    "time_to_first_token_ms": "to first",
    "time_per_output_token_ms": "each more",
    "detokenizing_ms": "to text",
    "model_ms": "model",
}
# Default texts: sentences of 3 to 43 words. They are English; a tokenizer for another language splits them
# into more tokens, so measurements on the user's own data are more meaningful.
STANDARD_TEXTS = (
    "It is late.",
    "Where is the station?",
    "She reads a book every evening.",
    "A man is riding a bicycle along the river.",
    "Two children in red coats are building a snowman in the park.",
    "The shop on the corner opens at nine in the morning and closes at six.",
    "I was told that the train to the airport leaves from the other side of the platform today.",
    "Although the film was far too long, the actors played so well that nobody wanted to leave early.",
    "After three days of heavy rain the old bridge was closed, and everybody had to take the road through"
    " the hills.",
    "Most of the people who came to the meeting had read the report, but only a few of them agreed with what"
    " it said about the schools.",
    "The museum, which was built more than a hundred years ago by a merchant who loved paintings, shows works"
    " of young artists from all over the country in the summer months.",
    "When the wind turned in the night, the fishermen pulled their boats up the beach, tied them to the posts"
    " behind the harbor wall, and waited in the small café until the first light let them see how high"
    " the waves had become.",
)


def time_artifacts(
    folders: Sequence[Path],
    data: Path | None = None,
    columns: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    device: str = "auto",
    progress: Progress = no_progress,
    trust_engine: bool = False,
) -> dict[str, Any]:
    """Measure the latency of the artifacts in `folders` on the same texts, compared with the first.

    Args:
        folders: artifacts of one task.
        data: a table, or a file with one text per line (.txt); None: `STANDARD_TEXTS`.
        columns: of the texts, as `read_examples` of `smelt.api.predict` takes them.
        settings: settings of `smelt.evaluate.latency.LatencySettings`.
        generation: settings of `smelt.generation.config.GenerationSettings`.
        device: auto, cpu or cuda.
        progress: called after every round.
        trust_engine: as in `smelt.load`.

    Returns:
        The output of `smelt bench --json`: baseline, texts, environment and, by artifact, its folder, size
        and latency (as `latency` in report.json) or error.

    Raises:
        InputError: a folder is not an artifact, artifacts of different tasks, no texts, unknown settings.
    """
    from smelt.api.load import parse_generation
    from smelt.evaluate.environment import describe_environment
    from smelt.evaluate.latency import LatencySettings, TimingJob, measure_latency
    from smelt.pipeline.inspect.machine import artifact_device

    artifacts = open_artifacts(folders)
    for artifact in artifacts.values():
        require_safe_artifact(artifact, trust_engine)
    task: Any = next(iter(artifacts.values())).manifest.task
    devices = {name: artifact_device(artifact, device) for name, artifact in artifacts.items()}
    latency_settings = LatencySettings(**(settings or {}))
    if data is not None and _takes_whole_calls(next(iter(artifacts.values())), data):
        latency_settings = latency_settings.model_copy(update={"batch_sizes": (1,)})
    baseline = next(iter(artifacts))
    with timing_samples(data, task, columns, artifacts[baseline], latency_settings) as (examples, arrays):
        result = measure_latency(
            {name: artifact.path for name, artifact in artifacts.items()},
            baseline,
            TimingJob(
                [example.text for example in examples],
                task,
                latency_settings,
                parse_generation(dict(generation or {})),
                pairs=[example.text_pair for example in examples],
                device=device,
                arrays=arrays,
            ),
            progress=progress,
        )
    errors = {name: messages_to_json([message])[0] for name, message in result.errors.items()}
    return {
        "baseline": baseline,
        "task": task,
        "texts": {"from": str(data) if data else "standard", "n": len(examples)},
        "settings": latency_settings.model_dump(mode="json"),
        "environment": describe_environment(),
        "artifacts": {
            name: {
                "folder": str(artifact.path),
                "key": artifact.key,
                "format": artifact.format,
                "target": artifact.manifest.details.get("target"),
                "runner": result.runners.get(name),
                "device": devices[name],
                "size_bytes": artifact.size_bytes,
                "peak_memory_bytes": result.peak_memory_bytes.get(name),
                "gpu_memory_bytes": result.gpu_memory_bytes.get(name),
                "error": errors.get(name),
                "latency": result.rows.get(name, []),
            }
            for name, artifact in artifacts.items()
        },
    }


def _takes_whole_calls(artifact: Artifact, data: Path) -> bool:
    """Return whether samples are the inputs of a whole call, which have no other batch size than 1."""
    if task_traits(artifact.manifest.task).modality != "arrays":
        return False
    return are_calls(data, read_signature(artifact.path).input_batch_axes)


@contextlib.contextmanager
def timing_samples(
    data: Path | None, task: str, columns: Sequence[str], artifact: Artifact, settings: LatencySettings
) -> Iterator[tuple[list[Example], Path | None]]:
    """Yield the samples to measure; for arrays, their indices as texts, and a file with the arrays."""
    from smelt.pipeline.execute import latency_scores

    if task_traits(task).modality == "arrays":
        with latency_scores.timing_samples(read_array_rows(data, artifact), settings) as (split, path):
            yield list(split.examples), path
    elif data is not None:
        yield read_samples(data, task, columns), None
    elif task_traits(task).reads_images or task_traits(task).modality == "audio":
        raise InputError(
            "--data is missing. Set it to a table of files: rows with the path of an image or of audio.",
            code="missing-data",
        )
    else:
        yield [Example(text) for text in STANDARD_TEXTS], None


def read_samples(path: Path, task: str, columns: Sequence[str] = ()) -> list[Example]:
    """Return the samples of a file, as `smelt predict` reads them, without empty texts.

    Raises:
        InputError: the file cannot be read, has no such column, or contains no text.
    """
    from smelt.api.predict import read_examples

    examples = [example for example in read_examples(path, task, columns) if example.text.strip()]
    if not examples:
        raise InputError(f"{path}: the file contains no texts.", code="empty-data", file=str(path))
    return examples


def timing_table(result: Mapping[str, Any]) -> str:
    """Return the latency table as text of at most 80 columns, with a block per batch size."""
    artifacts = result["artifacts"]
    unit = next((row["unit"] for a in artifacts.values() for row in a["latency"]), "texts/s")
    name_width = min(25, max(len("artifact"), *map(len, artifacts)))
    lines = [
        f"{'artifact':{name_width}} {'batch':>5} {'p50 ms':>8} {'p90 ms':>8} {unit:>11} {'speed-up':>18}"
    ]
    lines.append("─" * len(lines[0]))
    sizes = result["settings"]["batch_sizes"]
    for index, size in enumerate(sizes):
        lines += [""] if index else []
        for name, artifact in artifacts.items():
            row = next((row for row in artifact["latency"] if row["batch_size"] == size), None)
            lines.append(
                _table_line(
                    _truncate(name, name_width).ljust(name_width), size, row, name == result["baseline"]
                )
            )
    lines += _parts_table(artifacts, sizes[0], name_width, result["task"])
    counts = sorted({row["threads"] for a in artifacts.values() for row in a["latency"]})
    threads = " and ".join(map(str, counts)) or "no"
    devices_text = ", ".join(sorted({a["device"] for a in artifacts.values()}))
    texts, cpu = result["texts"], result["environment"]["cpu"]
    num_texts = max((row["texts"] for a in artifacts.values() for row in a["latency"]), default=texts["n"])
    spec = task_spec(result["task"])
    samples = count_text(texts["n"], spec.sample_noun)
    samples = f"{num_texts:,} of {samples}" if num_texts < texts["n"] else samples
    notes = [
        f"Measured from {spec.call}, in rounds that alternate with '{result['baseline']}'. Speed-up is"
        f" compared with '{result['baseline']}' [95 % interval]. {samples}"
        f" ({texts['from']}), {threads} thread{'s' * (counts != [1])}, {devices_text}, {cpu}."
    ]
    notes += _device_notes(artifacts, sizes[0])
    notes += [f"{name}: {a['error']['message']}" for name, a in artifacts.items() if a["error"]]
    unstable_rows: dict[str, list[str]] = {}
    for name, a in artifacts.items():
        for row in a["latency"]:
            if not row["stable"]:
                unstable_rows.setdefault(row["reason"], []).append(f"{name}, batch {row['batch_size']}")
    if unstable_rows:
        advice = f"{DISTURBED_MARK} Measurement disturbed; measure again when the machine is idle. "
        notes.append(
            advice
            + "; ".join(f"{'; '.join(labels)}: {reason}" for reason, labels in unstable_rows.items())
            + "."
        )
    return "\n".join(
        [*lines, "", *(wrapped_line for note in notes for wrapped_line in textwrap.wrap(note, _WIDTH))]
    )


def _device_notes(artifacts: Mapping[str, Any], size: int) -> list[str]:
    """Return the times of the graphs alone at batch `size`, and the memory on GPUs, where they are known."""
    graph_times = {
        name: _number_text(row["graph_ms"])
        for name, artifact in artifacts.items()
        for row in artifact["latency"]
        if row["batch_size"] == size and row["graph_ms"] is not None
    }
    gpu_memory = {
        name: _number_text(artifact["gpu_memory_bytes"] / 1e6)
        for name, artifact in artifacts.items()
        if artifact["gpu_memory_bytes"] is not None
    }
    labels = {f"Graphs alone, ms of a call at batch {size}": graph_times, "GPU memory, MB": gpu_memory}
    return [
        f"{label}: {', '.join(f'{name} {value}' for name, value in values.items())}."
        for label, values in labels.items()
        if values
    ]


def _table_line(name: str, size: int, row: Mapping[str, Any] | None, baseline: bool) -> str:
    if row is None:
        return f"{name} {size:>5} {'–':>8} {'–':>8} {'–':>11} {'–':>18}"
    ratio = "–"
    if row["speedup"] is not None:
        low, high = row["speedup_ci95"]
        mark = "" if row["stable"] else DISTURBED_MARK
        ratio = (
            "1"
            if baseline
            else f"{_number_text(row['speedup'])}{mark} [{_number_text(low)}, {_number_text(high)}]"
        )
    return (
        f"{name} {size:>5} {_number_text(row['p50_ms']):>8} {_number_text(row['p90_ms']):>8}"
        f" {_number_text(row['throughput']):>11} {ratio:>18}"
    )


def _parts_table(artifacts: Mapping[str, Any], size: int, room: int, task: str) -> list[str]:
    """Return the table of the parts of the median call at batch `size`; empty if no runner reports them."""
    latency_rows = {
        name: row for name, a in artifacts.items() for row in a["latency"] if row["batch_size"] == size
    }
    parts_by_name = {name: row["parts"] for name, row in latency_rows.items() if row["parts"]}
    if not parts_by_name:
        return []
    spec = task_spec(task)
    heads = _PART_HEADINGS | {"tokenizing_ms": spec.preprocessing, "rest_ms": spec.postprocessing}
    columns = [key for key in next(iter(parts_by_name.values())) if key in heads]
    lines = ["", f"{f'ms, batch {size}':{room}}" + "".join(f"{heads[key]:>11}" for key in columns)]
    for name, parts_ms in parts_by_name.items():
        cells = ("–" if parts_ms[key] is None else _number_text(parts_ms[key]) for key in columns)
        lines.append(_truncate(name, room).ljust(room) + "".join(f"{cell:>11}" for cell in cells))
    return lines


def _number_text(value: float) -> str:
    """Return `value` with three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _truncate(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def open_artifacts(folders: Sequence[Path]) -> dict[str, Artifact]:
    """Return the artifacts by short name: the folder's name, with the run's name if not unique.

    Raises:
        InputError: a folder is not an artifact, one is listed twice, or they are of different tasks.
    """
    paths = [Path(folder).expanduser() for folder in folders]
    if not paths:
        raise InputError("bench: no artifact given. Pass at least one folder.", code="missing-setting")
    for name in (lambda p: p.name, lambda p: f"{p.absolute().parent.parent.name}/{p.name}", str):
        names = [name(path) for path in paths]
        if len(set(names)) == len(names):
            break
    else:
        raise InputError(
            f"bench: an artifact is listed twice: {', '.join(names)}. Remove one.", code="duplicate-artifact"
        )
    artifacts_by_name = {name: read_artifact(path) for name, path in zip(names, paths, strict=True)}
    for artifact in artifacts_by_name.values():
        artifact.verify()
    tasks = {name: artifact.manifest.task for name, artifact in artifacts_by_name.items()}
    if len(set(tasks.values())) > 1:
        task_list = ", ".join(f"{name} is for {task}" for name, task in tasks.items())
        raise InputError(
            f"bench: the artifacts are for different tasks: {task_list}. Pass artifacts of one task.",
            code="different-tasks",
        )
    return artifacts_by_name
