"""`smelt eval`: a finished artifact, scored on data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact, read_artifact
from smelt.core.data import CLASSIFICATION, CUSTOM, SIMILARITY, Split
from smelt.core.errors import InputError, nearest, together
from smelt.core.labels import problem_type
from smelt.core.rows.examples import read_split
from smelt.core.shares import limited
from smelt.core.store.store import Store
from smelt.execute.scoring import Scorer
from smelt.look.data import parse_columns
from smelt.recipe.problem import AGREEMENT, METRICS_OF, SCORE_METRICS, metric_mistakes
from smelt.recipe.recipe import DEFAULT_METRICS, METRICS
from smelt.runtime.foreign.tried import require_safe
from smelt.use.arrays import read_rows


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
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Score the artifact in `folder` on the rows of `data`; return report.json's `quality` entries.

    window, stride: how a language model's text is cut, as a recipe's `data: {windows: {length, stride}}`;
    what is not said is as it was in the run that made the artifact. baseline: an artifact whose vectors a
    sentence embedder's are compared with, or the untouched graph. tokenize: how BLEU splits texts; by default
    as the references need. trust_engine: as of `smelt.load`. say: gets what was taken from there, and
    warnings.

    Raises:
        InputError: no artifact there, unknown metrics or columns, unreadable data, or windows that do not
            fit each other or the task.
    """
    import tempfile

    from smelt.use.loaded import generation_of

    artifact = _open(folder)
    require_safe(artifact, trust_engine)
    task: Any = artifact.manifest.task
    for metric in metrics:
        if metric not in METRICS[task]:
            known = ", ".join(METRICS[task])
            hint = nearest(metric, METRICS[task])
            raise InputError(
                f"--metric {metric}: not a metric for {task}; there are {known}.{hint}", code="unknown-metric"
            )
    metrics = _of_classifier(artifact, metrics) if task in CLASSIFICATION else metrics
    if tokenize is not None and "bleu" not in (metrics or DEFAULT_METRICS[task]):
        raise InputError(
            "--tokenize is for BLEU, which is not scored here: add --metric bleu.", code="settings-conflict"
        )
    if baseline is not None and task not in (SIMILARITY, CUSTOM):
        raise InputError(
            f"--baseline is for {SIMILARITY} and {CUSTOM}: only vectors and outputs are compared; this one"
            f" is for {task}.",
            code="does-not-fit-task",
        )
    if task == CUSTOM:
        if baseline is None:
            raise InputError(
                "--baseline: name the artifact of the untouched graph (runs/NAME/artifacts/model), whose"
                " outputs these are compared with.",
                code="missing-baseline",
            )
        whole = read_rows(Path(data), artifact)
    else:
        whole = read_split(data, task, parse_columns(columns), Path.cwd())
    split = limited(whole, limit)
    split = _cut(split, artifact, window, stride, say)
    with tempfile.TemporaryDirectory() as scratch:
        scorer = Scorer(
            Store(Path(scratch)),
            task,
            _of_vectors(metrics, split, baseline) if task == SIMILARITY else metrics or DEFAULT_METRICS[task],
            generation_of({"num_beams": num_beams, "max_new_tokens": max_new_tokens}),
            batch_size,
            threads,
            device=device,
            tokenize=tokenize,
            reference=None if baseline is None else _open(baseline),
        )
        score = scorer.score(artifact, split)
    for found in score["warnings"]:
        say(f"{found['severity']}: {found['message']}")
    quality: dict[str, Any] = score["quality"]
    return quality


def _cut(
    split: Split, artifact: Artifact, window: int | None, stride: int | None, say: Callable[[str], None]
) -> Split:
    """Return `split`, its text to be cut in windows as said, else as the run of `artifact` had it."""
    if split.windows is None:
        if window is not None or stride is not None:
            raise InputError(
                "--window and --stride are for language models; this one takes rows as they are.",
                code="does-not-fit-task",
            )
        return split
    own: dict[str, Any] = dict(artifact.manifest.details.get("windows") or {})
    if window is not None:  # a stride is chosen for a window
        own = {name: value for name, value in own.items() if name == "separator"}
    said = {name: n for name, n in (("length", window), ("stride", stride)) if n is not None}
    taken = own | said
    if taken.get("stride", 1) > taken.get("length", math.inf):
        raise InputError(
            f"--stride {taken['stride']} would leave out text between windows of {taken['length']} tokens.",
            code="settings-conflict",
        )
    if kept := {name: value for name, value in taken.items() if name not in said}:
        words = ", ".join(
            f"{'window' if name == 'length' else name} {value!r}" for name, value in kept.items()
        )
        say(f"as in the run that made it: {words}")
    return replace(split, windows=split.windows.model_copy(update=taken))


def _of_classifier(artifact: Artifact, metrics: Sequence[str]) -> tuple[str, ...]:
    """Return `metrics`, or where there are none those of what the classifier does.

    Raises:
        InputError: a metric does not fit it.
    """
    from smelt.look.model_folder import read_config

    problem = problem_type(read_config(artifact.path)[0])
    wrong = metric_mistakes(metrics, problem)
    if wrong:
        raise together(found.prefixed(f"--metric {metrics[at]}: ") for at, found in wrong)
    return tuple(metrics) or METRICS_OF[problem]


def _of_vectors(metrics: Sequence[str], split: Split, baseline: Path | None) -> tuple[str, ...]:
    """Return `metrics`, or where there are none what can be told of vectors.

    Raises:
        InputError: one needs scores or a baseline, and there is none; or neither is there.
    """
    can = (*(SCORE_METRICS if split.labelled else ()), *((AGREEMENT,) if baseline else ()))
    lacks = dict.fromkeys(SCORE_METRICS, "scores of pairs (column 'label')")
    lacks[AGREEMENT] = "--baseline ARTIFACT, whose vectors these are compared with"
    for metric in metrics:
        if metric not in can:
            raise InputError(f"--metric {metric}: needs {lacks[metric]}.", code="missing-data")
    if not can:
        raise InputError(
            f"{split.origin}: there is nothing to score: no {lacks['spearman']}, and no {lacks[AGREEMENT]}.",
            code="missing-data",
        )
    return tuple(metrics) or can


def quality_lines(scores: dict[str, Any]) -> list[str]:
    """Return one line per metric: value, 95 % interval, n, signature."""
    from smelt.evaluate.report.view import digits

    width = max([9, *map(len, scores)])
    return [
        f"{name:{width}} {s['value']:6.{n}f}  "
        + (f"[{s['ci95'][0]:.{n}f}, {s['ci95'][1]:.{n}f}]  " if s["ci95"] else "")
        + f"n={s['n']}  {s['signature']}"
        for name, s in scores.items()
        for n in [digits(name)]
    ]


def _open(folder: Path) -> Artifact:
    artifact = read_artifact(folder)
    artifact.verify()
    return artifact
