"""Score a finished artifact on data (`smelt eval`), and compare the latency of artifacts (`smelt bench`)."""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.api.array_models import read_array_rows
from smelt.api.scored_run import generation_with, scored_generation
from smelt.core.artifact import Artifact, read_artifact
from smelt.core.errors import InputError, combined_error, did_you_mean
from smelt.core.messages import messages_to_json
from smelt.core.store import Store
from smelt.data.column_hints import column_options
from smelt.data.labels import problem_type
from smelt.data.split_division import limit_split
from smelt.data.splits import Split
from smelt.data.tasks import task_traits
from smelt.evaluate.metrics.registry import (
    AGREEMENT_METRIC,
    CORRELATION_METRICS,
    DEFAULT_METRICS,
    DEFAULTS_BY_PROBLEM,
    METRICS,
    METRICS_BY_TASK,
    absent_metric_hint,
    is_custom_metric,
    metric_settings_type,
    scores_agreement_alone,
    takes_custom_metrics,
)
from smelt.pipeline.execute.scoring import Scorer
from smelt.pipeline.inspect.data_files import parse_columns
from smelt.pipeline.recipe.model_and_data import metric_errors
from smelt.runtimes.onnx_import.trial_run import require_safe_artifact
from smelt.stage import Progress, no_progress
from smelt.tasks.read_split import read_split
from smelt.tasks.registry import task_spec

if TYPE_CHECKING:
    from smelt.evaluate.latency import LatencySettings
    from smelt.generation.config import GenerationSettings


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What `evaluate_artifact` scores and how: the options of `smelt eval`.

    Attributes:
        metrics: metrics; default those of the task.
        columns: ROLE=NAME for columns with other names.
        batch_size: samples per batch.
        num_beams: number of beams; default as in the run that made the artifact, else 1.
        max_new_tokens: maximum output length; default as in that run, else the model's.
        threads: CPU threads.
        limit: use at most this many samples.
        device: auto, cpu or cuda.
        window: language models: tokens per window; default as in the run that made the artifact.
        stride: language models: tokens between windows; default as in that run.
        baseline: artifact to compare with: for `agreement`, and for `custom`.
        tokenize: BLEU's tokenizer; default by the references.
        trust_engine: as in `smelt.load`.
    """

    metrics: Sequence[str] = ()
    columns: Sequence[str] = ()
    batch_size: int = 32
    num_beams: int | None = None
    max_new_tokens: int | None = None
    threads: int | None = None
    limit: int | None = None
    device: str = "auto"
    window: int | None = None
    stride: int | None = None
    baseline: Path | None = None
    tokenize: str | None = None
    trust_engine: bool = False


def evaluate_artifact(
    folder: Path,
    data: str,
    options: EvaluationOptions | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Score the artifact in `folder` on `data`; return entries as in `quality` of report.json.

    Args:
        folder: an artifact.
        data: a file or hub id with samples.
        options: what is scored and how; None: the defaults.
        report: called with notes and warnings.

    Raises:
        InputError: the folder is not an artifact, unknown metrics or columns, unreadable data, or window
            settings that do not fit the task or each other.
    """
    import tempfile

    options = options or EvaluationOptions()
    artifact = _open_artifact(folder)
    require_safe_artifact(artifact, options.trust_engine)
    task: Any = artifact.manifest.task
    _check_metric_names(options.metrics, task)
    is_classifier, is_embedder = (task_traits(task).output == output for output in ("labels", "embedding"))
    metrics = _classifier_metrics(artifact, options.metrics) if is_classifier else options.metrics
    scored = metrics or DEFAULT_METRICS[task]
    tokenized = [name for name in scored if "tokenize" in metric_settings_type(name).model_fields]
    if options.tokenize is not None and not tokenized:
        raise InputError(
            "--tokenize is only for BLEU, which is not scored. Add --metric bleu.", code="settings-conflict"
        )
    _check_baseline(metrics, task, options.baseline)
    if task_traits(task).modality == "arrays":
        full_split = read_array_rows(Path(data), artifact)
    else:
        unlabeled = scores_agreement_alone(metrics)
        with column_options():
            full_split = read_split(
                data, task, parse_columns(options.columns), Path.cwd(), targets_optional=unlabeled
            )
    split = _with_windows(
        limit_split(full_split, options.limit), artifact, options.window, options.stride, report
    )
    with tempfile.TemporaryDirectory() as scratch:
        scorer = Scorer(
            Store(Path(scratch)),
            task,
            _embedder_metrics(metrics, split, options.baseline) if is_embedder else scored,
            _eval_generation(folder, artifact, options.num_beams, options.max_new_tokens, report),
            options.batch_size,
            options.threads,
            device=options.device,
            metric_settings={name: {"tokenize": options.tokenize} for name in tokenized}
            if options.tokenize is not None
            else {},
            reference=None if options.baseline is None else _open_artifact(options.baseline),
        )
        score = scorer.score(artifact, split)
    for message in score["warnings"]:
        report(f"{message['severity']}: {message['message']}")
    quality: dict[str, Any] = score["quality"]
    return quality


def _check_metric_names(metrics: Sequence[str], task: Any) -> None:
    """Check that the command line can name each of `metrics` for `task`.

    Raises:
        InputError: one is not a metric of the task, or needs a setting that only a recipe has.
    """
    for metric in metrics:
        if metric not in METRICS_BY_TASK[task]:
            supported_metrics = ", ".join(METRICS_BY_TASK[task])
            hint = absent_metric_hint(metric) or did_you_mean(metric, METRICS_BY_TASK[task])
            if is_custom_metric(metric) and takes_custom_metrics(task):
                hint = f" Your custom metric is scored by a recipe: score: {{quality: ['{metric}']}}."
            raise InputError(
                f"--metric {metric}: not a metric for {task}. Available metrics: {supported_metrics}.{hint}",
                code="unknown-metric",
            )
    for metric in metrics:
        settings_class = METRICS[metric].settings
        if settings_class and any(setting.is_required() for setting in settings_class.model_fields.values()):
            names = ", ".join(name for name, s in settings_class.model_fields.items() if s.is_required())
            raise InputError(
                f"--metric {metric}: needs the setting {names}, which only a recipe can give. Score it with"
                f" score: {{quality: [{{{metric}: {{{names}: ...}}}}]}}.",
                code="missing-setting",
            )


def _check_baseline(metrics: Sequence[str], task: Any, baseline: Path | None) -> None:
    """Check that there is a baseline if the metrics or the task need one, and only then.

    Raises:
        InputError: it is missing, or not used.
    """
    has_agreement = AGREEMENT_METRIC in metrics
    is_optional = task_traits(task).output in ("embedding", "arrays")
    if baseline is not None and not has_agreement and not is_optional:
        raise InputError(
            f"--baseline is only used by the metric {AGREEMENT_METRIC}, which is not scored. Add --metric"
            f" {AGREEMENT_METRIC}, or remove --baseline.",
            code="does-not-fit-task",
        )
    if baseline is None and has_agreement and not is_optional:
        raise InputError(
            f"--metric {AGREEMENT_METRIC} needs --baseline ARTIFACT, whose outputs are compared with.",
            code="missing-baseline",
        )
    if baseline is None and task_traits(task).modality == "arrays":
        raise InputError(
            "--baseline is missing. Set it to the artifact of the original graph"
            " (runs/NAME/artifacts/model), to compare outputs with.",
            code="missing-baseline",
        )


def _eval_generation(
    folder: Path,
    artifact: Artifact,
    num_beams: int | None,
    max_new_tokens: int | None,
    report: Callable[[str], None],
) -> GenerationSettings:
    """Return the settings of the run that made `artifact`, with those given; report if they are the run's."""
    from smelt.api.load import parse_generation

    scored = scored_generation(folder, artifact)
    options = {"num_beams": num_beams, "max_new_tokens": max_new_tokens}
    generation: GenerationSettings = parse_generation(generation_with(scored, options))
    if scored and num_beams is None:
        report(f"generation settings of the run: {generation.summary()}")
    return generation


def _with_windows(
    split: Split, artifact: Artifact, window: int | None, stride: int | None, report: Callable[[str], None]
) -> Split:
    """Return `split` with the window settings given, else those of the run that made `artifact`."""
    if split.windows is None:
        if window is not None or stride is not None:
            raise InputError(
                "--window and --stride are only for language models. Remove them.",
                code="does-not-fit-task",
            )
        return split
    run_settings: dict[str, Any] = dict(artifact.manifest.details.get("windows") or {})
    if window is not None:  # the run's stride is for the run's window
        run_settings = {name: value for name, value in run_settings.items() if name == "separator"}
    requested = {name: n for name, n in (("length", window), ("stride", stride)) if n is not None}
    windows = run_settings | requested
    if windows.get("stride", 1) > windows.get("length", math.inf):
        raise InputError(
            f"--stride {windows['stride']} skips text between windows of {windows['length']} tokens. Set"
            " --stride to the window or less.",
            code="settings-conflict",
        )
    if run_values := {name: value for name, value in windows.items() if name not in requested}:
        settings_text = ", ".join(
            f"{'window' if name == 'length' else name} {value!r}" for name, value in run_values.items()
        )
        report(f"window settings of the run: {settings_text}")
    return replace(split, windows=split.windows.model_copy(update=windows))


def _classifier_metrics(artifact: Artifact, metrics: Sequence[str]) -> tuple[str, ...]:
    """Return `metrics`, or the default metrics of the classifier's problem type.

    Raises:
        InputError: a metric does not fit the problem type.
    """
    from smelt.pipeline.inspect.model_folder import read_config

    problem = problem_type(read_config(artifact.path)[0])
    errors = metric_errors(metrics, problem)
    if errors:
        raise combined_error(error.with_prefix(f"--metric {metrics[index]}: ") for index, error in errors)
    return tuple(metrics) or DEFAULTS_BY_PROBLEM[problem]


def _embedder_metrics(metrics: Sequence[str], split: Split, baseline: Path | None) -> tuple[str, ...]:
    """Return `metrics`, or all metrics that can be computed.

    Raises:
        InputError: a metric needs scores or a baseline that is missing, or both are missing.
    """
    available = (
        *(CORRELATION_METRICS if split.has_labels else ()),
        *((AGREEMENT_METRIC,) if baseline else ()),
    )
    requirements = dict.fromkeys(CORRELATION_METRICS, "scored pairs (column 'label')")
    requirements[AGREEMENT_METRIC] = "--baseline ARTIFACT to compare embeddings with"
    for metric in metrics:
        if metric not in available:
            raise InputError(f"--metric {metric}: needs {requirements[metric]}.", code="missing-data")
    if not available:
        raise InputError(
            f"{split.origin}: no metric can be computed. Add {requirements[CORRELATION_METRICS[0]]}, or"
            f" {requirements[AGREEMENT_METRIC]}.",
            code="missing-data",
        )
    return tuple(metrics) or available


def quality_lines(scores: dict[str, Any]) -> list[str]:
    """Return one line per metric: value, 95 % interval, n, signature."""
    from smelt.evaluate.report.view import metric_digits

    width = max([9, *map(len, scores)])
    return [
        f"{name:{width}} {s['value']:6.{n}f}  "
        + (f"[{s['ci95'][0]:.{n}f}, {s['ci95'][1]:.{n}f}]  " if s["ci95"] else "")
        + f"n={s['n']}  {s['signature']}"
        for name, s in scores.items()
        for n in [metric_digits(name)]
    ]


def _open_artifact(folder: Path) -> Artifact:
    artifact = read_artifact(folder)
    artifact.verify()
    return artifact


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
    "rest_ms": "labels",
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
    " behind the harbour wall, and waited in the small café until the first light let them see how high"
    " the waves had become.",
)


def time_artifacts(
    folders: Sequence[Path],
    data: Path | None = None,
    column: str | None = None,
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
        column: name of the column with the texts, if not that of a recipe.
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
    baseline = next(iter(artifacts))
    with _timing_texts(data, task, column, artifacts[baseline], latency_settings) as (texts, arrays):
        result = measure_latency(
            {name: artifact.path for name, artifact in artifacts.items()},
            baseline,
            TimingJob(
                texts,
                task,
                latency_settings,
                parse_generation(dict(generation or {})),
                device=device,
                arrays=arrays,
            ),
            progress=progress,
        )
    errors = {name: messages_to_json([message])[0] for name, message in result.errors.items()}
    return {
        "baseline": baseline,
        "task": task,
        "texts": {"from": str(data) if data else "standard", "n": len(texts)},
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
                "error": errors.get(name),
                "latency": result.rows.get(name, []),
            }
            for name, artifact in artifacts.items()
        },
    }


@contextlib.contextmanager
def _timing_texts(
    data: Path | None, task: str, column: str | None, artifact: Artifact, settings: LatencySettings
) -> Iterator[tuple[list[str], Path | None]]:
    """Yield the texts to measure; for arrays, the samples' indices and a file with the arrays."""
    if task_traits(task).modality == "image":
        from smelt.api.predict import read_examples

        if data is None:
            raise InputError(
                "--data is missing. Set it to a folder of images with one subfolder per class, or to a"
                " table of image files.",
                code="missing-data",
            )
        yield [e.text for e in read_examples(data, task, () if column is None else (column,))], None
        return
    if task_traits(task).modality != "arrays":
        yield list(STANDARD_TEXTS) if data is None else read_texts(data, task, column), None
        return
    from smelt.pipeline.execute.latency_scores import timing_samples

    with timing_samples(read_array_rows(data, artifact), settings) as (split, path):
        yield [example.text for example in split.examples], path


def read_texts(path: Path, task: str, column: str | None = None) -> list[str]:
    """Return the texts of a file: its lines (.txt), or one column of a table.

    Raises:
        InputError: the file cannot be read, has no such column, or contains no text.
    """
    from smelt.data.csv_rows import read_file_rows
    from smelt.data.json_rows import data_suffix, read_text_file
    from smelt.data.splits import Columns
    from smelt.pipeline.inspect.data_files import guess_column
    from smelt.tasks.text_generation import parse_prompt

    if not path.is_file():
        code, problem = (
            ("not-a-file", "a folder, not a file") if path.is_dir() else ("missing-file", "no such file")
        )
        raise InputError(f"{path}: {problem} (--data).", code=code, file=str(path))
    if data_suffix(path) == ".txt":
        texts = [line for line in read_text_file(path).splitlines() if line.strip()]
    else:
        role = "source" if task_traits(task).architecture == "encoder-decoder" else "text"
        texts = []
        for location, row in read_file_rows(path):
            if task_traits(task).samples == "prompts" and column is None:
                with column_options("prompt", is_name_only=True):
                    texts.append(parse_prompt(row, location, Columns()).text)
                continue
            name = column or guess_column(row, role) or getattr(Columns(), role)
            if not isinstance(row.get(name), str):
                hint = did_you_mean(name, map(str, row))
                raise InputError(
                    f"{location}: no column '{name}' with text. Columns: {', '.join(map(str, row))}.{hint}"
                    " Set the right one with --column.",
                    code="missing-column",
                ).with_location(location)
            texts.append(str(row[name]))
    if not texts:
        raise InputError(f"{path}: the file contains no texts.", code="empty-data", file=str(path))
    return texts


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
    count = f"{num_texts:,} of {texts['n']:,}" if num_texts < texts["n"] else f"{texts['n']:,}"
    spec = task_spec(result["task"])
    notes = [
        f"Measured from {spec.call}, in rounds that alternate with '{result['baseline']}'. Speed-up is"
        f" compared with '{result['baseline']}' [95 % interval]. {count} {spec.sample_noun}"
        f" ({texts['from']}), {threads} thread{'s' * (counts != [1])}, {devices_text}, {cpu}."
    ]
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
    columns = [key for key in next(iter(parts_by_name.values())) if key in _PART_HEADINGS]
    heads = _PART_HEADINGS | {"tokenizing_ms": task_spec(task).preprocessing}
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
