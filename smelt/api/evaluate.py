"""Score a finished artifact on data, for `smelt eval`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smelt.api.array_models import read_array_rows
from smelt.core.artifact import Artifact, read_artifact
from smelt.core.errors import InputError, combined_error, did_you_mean
from smelt.core.store import Store
from smelt.data.examples import read_split
from smelt.data.labels import problem_type
from smelt.data.split_division import limit_split
from smelt.data.splits import CLASSIFICATION_TASKS, CUSTOM_TASK, SENTENCE_SIMILARITY, Split
from smelt.evaluate.metrics import (
    AGREEMENT_METRIC,
    CORRELATION_METRICS,
    DEFAULT_METRICS,
    DEFAULTS_BY_PROBLEM,
    METRICS,
    METRICS_BY_TASK,
    absent_metric_hint,
    is_own_metric,
    scores_agreement_alone,
    takes_own_metrics,
)
from smelt.pipeline.execute.scoring import Scorer
from smelt.pipeline.inspect.data_files import parse_columns
from smelt.pipeline.recipe.model_and_data import metric_mistakes
from smelt.runtimes.third_party.trial_run import require_safe_artifact


def evaluate_artifact(
    folder: Path,
    data: str,
    metrics: Sequence[str] = (),
    columns: Sequence[str] = (),
    batch_size: int = 32,
    num_beams: int = 1,
    max_new_tokens: int | None = None,
    threads: int | None = None,
    limit: int | None = None,
    device: str = "auto",
    window: int | None = None,
    stride: int | None = None,
    baseline: Path | None = None,
    tokenize: str | None = None,
    trust_engine: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Score the artifact in `folder` on `data`; return entries as in `quality` of report.json.

    Args:
        folder: an artifact.
        data: a file or hub id with samples.
        metrics: metrics; default those of the task.
        columns: ROLE=NAME for columns with other names.
        batch_size: samples per batch.
        num_beams: number of beams.
        max_new_tokens: maximum output length; default the model's.
        threads: CPU threads.
        limit: use at most this many samples.
        device: auto, cpu or cuda.
        window: language models: tokens per window; default as in the run that made the artifact.
        stride: language models: tokens between windows; default as in that run.
        baseline: artifact to compare with: for `agreement`, and for `custom`.
        tokenize: BLEU's tokenizer; default by the references.
        trust_engine: as in `smelt.load`.
        report: called with notes and warnings.

    Raises:
        InputError: the folder is not an artifact, unknown metrics or columns, unreadable data, or window
            settings that do not fit the task or each other.
    """
    import tempfile

    from smelt.api.load import parse_generation

    artifact = _open_artifact(folder)
    require_safe_artifact(artifact, trust_engine)
    task: Any = artifact.manifest.task
    for metric in metrics:
        if metric not in METRICS_BY_TASK[task]:
            known = ", ".join(METRICS_BY_TASK[task])
            hint = absent_metric_hint(metric) or did_you_mean(metric, METRICS_BY_TASK[task])
            if is_own_metric(metric) and takes_own_metrics(task):
                hint = f" Your own metric is scored by a recipe: score: {{quality: ['{metric}']}}."
            raise InputError(
                f"--metric {metric}: not a metric for {task}. Available metrics: {known}.{hint}",
                code="unknown-metric",
            )
    for metric in metrics:
        needed = METRICS[metric].settings
        if needed and any(setting.is_required() for setting in needed.model_fields.values()):
            names = ", ".join(name for name, s in needed.model_fields.items() if s.is_required())
            raise InputError(
                f"--metric {metric}: needs the setting {names}, which only a recipe can give. Score it with"
                f" score: {{quality: [{{{metric}: {{{names}: ...}}}}]}}.",
                code="missing-setting",
            )
    metrics = _classifier_metrics(artifact, metrics) if task in CLASSIFICATION_TASKS else metrics
    if tokenize is not None and "bleu" not in (metrics or DEFAULT_METRICS[task]):
        raise InputError(
            "--tokenize is only for BLEU, which is not scored. Add --metric bleu.", code="settings-conflict"
        )
    compared = AGREEMENT_METRIC in metrics
    if baseline is not None and not compared and task not in (SENTENCE_SIMILARITY, CUSTOM_TASK):
        raise InputError(
            f"--baseline is only used by the metric {AGREEMENT_METRIC}, which is not scored. Add --metric"
            f" {AGREEMENT_METRIC}, or remove --baseline.",
            code="does-not-fit-task",
        )
    if baseline is None and compared and task not in (SENTENCE_SIMILARITY, CUSTOM_TASK):
        raise InputError(
            f"--metric {AGREEMENT_METRIC} needs --baseline ARTIFACT, whose outputs are compared with.",
            code="missing-baseline",
        )
    if task == CUSTOM_TASK:
        if baseline is None:
            raise InputError(
                "--baseline is missing. Set it to the artifact of the original graph"
                " (runs/NAME/artifacts/model), to compare outputs with.",
                code="missing-baseline",
            )
        whole = read_array_rows(Path(data), artifact)
    else:
        unlabelled = scores_agreement_alone(metrics)
        whole = read_split(data, task, parse_columns(columns), Path.cwd(), targets_optional=unlabelled)
    split = limit_split(whole, limit)
    split = _with_windows(split, artifact, window, stride, report)
    with tempfile.TemporaryDirectory() as scratch:
        scorer = Scorer(
            Store(Path(scratch)),
            task,
            _embedder_metrics(metrics, split, baseline)
            if task == SENTENCE_SIMILARITY
            else metrics or DEFAULT_METRICS[task],
            parse_generation({"num_beams": num_beams, "max_new_tokens": max_new_tokens}),
            batch_size,
            threads,
            device=device,
            metric_settings={} if tokenize is None else {"bleu": {"tokenize": tokenize}},
            reference=None if baseline is None else _open_artifact(baseline),
        )
        score = scorer.score(artifact, split)
    for found in score["warnings"]:
        report(f"{found['severity']}: {found['message']}")
    quality: dict[str, Any] = score["quality"]
    return quality


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
    own: dict[str, Any] = dict(artifact.manifest.details.get("windows") or {})
    if window is not None:  # the run's stride is for the run's window
        own = {name: value for name, value in own.items() if name == "separator"}
    requested = {name: n for name, n in (("length", window), ("stride", stride)) if n is not None}
    taken = own | requested
    if taken.get("stride", 1) > taken.get("length", math.inf):
        raise InputError(
            f"--stride {taken['stride']} skips text between windows of {taken['length']} tokens. Set"
            " --stride to the window or less.",
            code="settings-conflict",
        )
    if kept := {name: value for name, value in taken.items() if name not in requested}:
        words = ", ".join(
            f"{'window' if name == 'length' else name} {value!r}" for name, value in kept.items()
        )
        report(f"window settings of the run: {words}")
    return replace(split, windows=split.windows.model_copy(update=taken))


def _classifier_metrics(artifact: Artifact, metrics: Sequence[str]) -> tuple[str, ...]:
    """Return `metrics`, or the default metrics of the classifier's problem type.

    Raises:
        InputError: a metric does not fit the problem type.
    """
    from smelt.pipeline.inspect.model_folder import read_config

    problem = problem_type(read_config(artifact.path)[0])
    wrong = metric_mistakes(metrics, problem)
    if wrong:
        raise combined_error(found.with_prefix(f"--metric {metrics[at]}: ") for at, found in wrong)
    return tuple(metrics) or DEFAULTS_BY_PROBLEM[problem]


def _embedder_metrics(metrics: Sequence[str], split: Split, baseline: Path | None) -> tuple[str, ...]:
    """Return `metrics`, or all metrics that can be computed.

    Raises:
        InputError: a metric needs scores or a baseline that is missing, or both are missing.
    """
    can = (*(CORRELATION_METRICS if split.has_labels else ()), *((AGREEMENT_METRIC,) if baseline else ()))
    lacks = dict.fromkeys(CORRELATION_METRICS, "scored pairs (column 'label')")
    lacks[AGREEMENT_METRIC] = "--baseline ARTIFACT to compare embeddings with"
    for metric in metrics:
        if metric not in can:
            raise InputError(f"--metric {metric}: needs {lacks[metric]}.", code="missing-data")
    if not can:
        raise InputError(
            f"{split.origin}: no metric can be computed. Add {lacks['spearman']}, or"
            f" {lacks[AGREEMENT_METRIC]}.",
            code="missing-data",
        )
    return tuple(metrics) or can


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
