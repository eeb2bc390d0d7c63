"""Score a finished artifact on data (`smelt eval`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.api.array_models import read_array_rows
from smelt.api.scored_run import generation_with, scored_generation
from smelt.core.artifact import Artifact, read_artifact
from smelt.core.errors import InputError, combined_error
from smelt.core.store import Store
from smelt.data.labels import class_names, problem_type
from smelt.data.split_division import limit_split
from smelt.data.splits import Split, column_options
from smelt.data.tasks import task_traits
from smelt.evaluate.metrics.metric import MetricSettingValues
from smelt.evaluate.metrics.registry import (
    AGREEMENT_METRIC,
    CORRELATION_METRICS,
    DEFAULT_METRICS,
    DEFAULTS_BY_PROBLEM,
    METRICS_BY_TASK,
    find_metric,
    is_custom_metric,
    metric_settings_type,
    require_known_metrics,
    scores_agreement_alone,
    takes_custom_metrics,
)
from smelt.pipeline.execute.scoring import Scorer
from smelt.pipeline.inspect.data_files import parse_columns
from smelt.pipeline.recipe.model_and_data import metric_errors
from smelt.pipeline.recipe.recipe import extract_metric_settings
from smelt.pipeline.recipe.validation_errors import RecipeErrors
from smelt.pipeline.recipe.yaml_file import YamlDocument, parse_yaml
from smelt.runtimes.onnx_import.signature import read_signature
from smelt.runtimes.onnx_import.trial_run import require_safe_artifact
from smelt.tasks.read_split import read_split

if TYPE_CHECKING:
    from smelt.generation.config import GenerationSettings


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What `evaluate_artifact` scores and how: the options of `smelt eval`.

    Attributes:
        metrics: metrics as in `score.quality`, with settings as YAML: "allclose: {atol: 0.01}"; default those
            of the task. A function `module:function` is imported from the current folder, or an installed
            package.
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
        InputError: the folder is not an artifact, unknown metrics or columns, wrong settings of metrics,
            unreadable data, or window settings that do not fit the task or each other.
    """
    import tempfile

    options = options or EvaluationOptions()
    artifact = _open_artifact(folder)
    require_safe_artifact(artifact, options.trust_engine)
    task: Any = artifact.manifest.task
    listed_metrics, settings = read_metrics(options.metrics)
    may_be_custom = takes_custom_metrics(task)
    named = [name for name in listed_metrics if not (may_be_custom and is_custom_metric(name))]
    require_known_metrics(named, METRICS_BY_TASK[task], "--metric")
    is_classifier, is_embedder = (task_traits(task).output == output for output in ("labels", "embedding"))
    metrics = _classifier_metrics(artifact, listed_metrics) if is_classifier else listed_metrics
    scored = metrics or DEFAULT_METRICS[task]
    tokenized = [name for name in scored if "tokenize" in metric_settings_type(name).model_fields]
    if options.tokenize is not None and not tokenized:
        raise InputError(
            "--tokenize is only for BLEU, which is not scored. Add --metric bleu.", code="settings-conflict"
        )
    if options.tokenize is not None:
        settings |= {name: settings.get(name, {}) | {"tokenize": options.tokenize} for name in tokenized}
    _check_baseline(metrics, task, options.baseline)
    if task_traits(task).modality == "arrays":
        _check_graph(artifact, scored, settings)
        full_split = read_array_rows(Path(data), artifact, scored, settings)
    else:
        unlabeled = scores_agreement_alone(metrics)
        with column_options():
            full_split = read_split(
                data, task, parse_columns(options.columns), Path.cwd(), targets_optional=unlabeled
            )
    for name in listed_metrics:
        find_metric(name).check(settings.get(name, {}), Path.cwd(), {"test": full_split})
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
            metric_settings=settings,
            base=Path.cwd(),
            reference=None if options.baseline is None else _open_artifact(options.baseline),
        )
        score = scorer.score(artifact, split)
    for message in score["warnings"]:
        report(f"{message['severity']}: {message['message']}")
    quality: dict[str, Any] = score["quality"]
    return quality


def read_metrics(entries: Sequence[str]) -> tuple[tuple[str, ...], dict[str, dict[str, Any]]]:
    """Return the metrics of `--metric`, whose values are entries of `score.quality`, and their settings.

    Raises:
        InputError: an entry is not YAML, or a setting is wrong.
    """
    documents = [parse_yaml(entry, f"--metric {entry}") for entry in entries]
    names = [
        document.value if isinstance(document.value, dict) else entry
        for entry, document in zip(entries, documents, strict=True)
    ]
    yaml_errors = [error for document in documents for error in document.errors]
    document = YamlDocument("--metric", {"score": {"quality": names}}, errors=yaml_errors)
    errors = RecipeErrors(document)
    settings = extract_metric_settings(document.value, errors)
    errors.raise_if_any()
    return tuple(str(name) for name in document.value["score"]["quality"]), settings


def _check_graph(artifact: Artifact, metrics: Sequence[str], settings: MetricSettingValues) -> None:
    """Check that the settings of metrics match the outputs of a third-party graph.

    Raises:
        InputError: an output is missing, or has no such axis.
    """
    shapes = read_signature(artifact.path).output_shapes
    for metric in metrics:
        find_metric(metric).check_graph(settings.get(metric, {}), shapes)


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

    config = read_config(artifact.path)[0]
    problem = problem_type(config)
    errors = metric_errors(metrics, problem, len(class_names(config)))
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
