"""Tables of a report's scores by class, and over the folds of a cross-validation."""

from __future__ import annotations

from smelt.evaluate.report import view
from smelt.evaluate.report.schema import ReportData, StepReport
from smelt.evaluate.report.step_schema import ClassReport

FOLDS_LEGEND = (
    "Mean ± standard deviation over the folds: runs of the whole recipe without a part of the training"
    " samples, scored on that part. Differences from the baseline are paired, on the held-out samples of all"
    " folds."
)


def fold_table(report: ReportData) -> tuple[list[str], list[list[str]]] | None:
    """Return head and rows of the scores of cross-validation; None if there was none."""
    steps = [row.step for row in view.tree_rows(report) if row.step.folds]
    if not steps:
        return None
    names = list(dict.fromkeys(name for step in steps for name in step.folds))
    head = ["step", *(text for name in names for text in (view.metric_label(name), "difference"))]
    rows = []
    for step in steps:
        cells = [step.name]
        for name in names:
            fold_score, digits = step.folds.get(name), view.metric_digits(name)
            score_text = view.MISSING_TEXT
            if fold_score is not None:
                mean, std = (view.number_text(value, digits) for value in (fold_score.mean, fold_score.std))
                score_text = f"{mean} ± {std}"
            cells += [score_text, view.MISSING_TEXT]
            if fold_score is not None and (change := fold_score.against_baseline) is not None:
                interval = view.difference_interval_text(change, name)
                cells[-1] = f"{view.difference_text(change, name)} {interval}".rstrip()
        rows.append(cells)
    return head, rows


def class_table(
    report: ReportData,
) -> tuple[list[StepReport], list[tuple[str, int, list[ClassReport | None]]]]:
    """Return the steps with scores by class, and (class, samples, scores of each step) of every class."""
    steps = [row.step for row in view.tree_rows(report) if row.step.classes]
    by_label = [{entry.label: entry for entry in step.classes or ()} for step in steps]
    labels = dict.fromkeys(label for classes in by_label for label in classes)
    rows = []
    for label in labels:
        scores = [classes.get(label) for classes in by_label]
        rows.append((label, max(score.n for score in scores if score), scores))
    return steps, rows
