"""Score files of texts that another program wrote (`smelt score`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smelt.api.evaluate import quality_lines, read_metrics
from smelt.core.errors import InputError
from smelt.data.json_rows import open_text, read_lines
from smelt.evaluate.metrics.registry import (
    TEXT_METRICS,
    find_metric,
    require_known_metrics,
)
from smelt.evaluate.quality import MetricScore, score_texts
from smelt.evaluate.significance import compare_steps, holm

DEFAULT_METRICS = ("bleu", "chrf")


def score_files(
    hypotheses: Path,
    references: Sequence[Path],
    metrics: Sequence[str] = (),
    *,
    baseline: Path | None = None,
    language: str | None = None,
    device: str = "auto",
) -> dict[str, dict[str, Any]]:
    """Score a file of texts against files of references; compare it with the texts of a baseline in pairs.

    All files are UTF-8 text, also as .gz, with a text per line; line ends are LF or CR LF.

    Args:
        hypotheses: the texts that are scored.
        references: one or more files; each has a reference for each text.
        metrics: metrics of texts as in `score.quality`, with settings as YAML; default: bleu and chrf.
        baseline: other texts for the same references.
        language: of the references, an ISO 639 code; default: by their script.
        device: auto, cpu or cuda, for metrics with a model.

    Returns:
        By metric an entry as in `quality` of report.json; with a baseline also `baseline`, its value, and
        `against_baseline`: the paired difference as in report.json.

    Raises:
        InputError: a file cannot be read, files have different numbers of lines, a text without a reference,
            or unknown metrics.
        MissingDependencyError: what a metric needs is not installed.
    """
    if language is not None and not re.fullmatch(r"[A-Za-z]{2,3}([_-]\w+)*", language):
        raise InputError(
            f"--language {language}: not an ISO 639 code. Use a code such as de, ja or zh.",
            code="wrong-value",
        )
    names, settings = read_metrics(metrics)
    require_known_metrics(names, TEXT_METRICS, "--metric")
    names = names or DEFAULT_METRICS
    for name in names:
        find_metric(name).check(settings.get(name, {}), Path.cwd(), {})
    texts = {path: _read_texts(path) for path in (hypotheses, *references, *([baseline] if baseline else []))}
    _require_equal_counts(texts)
    by_text = list(zip(*(texts[path] for path in references), strict=True))
    _require_references(references[0], by_text)

    def score(path: Path) -> dict[str, MetricScore]:
        return score_texts(names, texts[path], by_text, settings, language, Path.cwd(), device)

    scores = score(hypotheses)
    entries = {name: score.to_report() for name, score in scores.items()}
    if baseline is None:
        return entries
    baseline_scores = score(baseline)
    differences = {
        name: compare_steps(scores[name].statistics, baseline_scores[name].statistics) for name in scores
    }
    corrected = holm([difference["p_value"] for difference in differences.values()])
    for (name, difference), p_value in zip(differences.items(), corrected, strict=True):
        entries[name]["baseline"] = baseline_scores[name].value
        entries[name]["against_baseline"] = {**difference, "p_value_holm": p_value}
    return entries


def score_lines(scores: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of each metric: score, difference from the baseline, signature."""
    lines = []
    for name, entry in scores.items():
        lines += [line.rstrip() for line in quality_lines({name: entry | {"signature": ""}})]
        lines += [_difference_line(name, entry)] if "baseline" in entry else []
        lines.append(f"  {entry['signature']}")
    return lines


def _difference_line(name: str, entry: dict[str, Any]) -> str:
    digits, compared = find_metric(name).digits, entry["against_baseline"]
    interval = compared["ci95"]
    ends = "" if interval is None else f" [{interval[0]:+.{digits}f}, {interval[1]:+.{digits}f}]"
    return (
        f"  baseline {entry['baseline']:.{digits}f}; difference {compared['difference']:+.{digits}f}{ends},"
        f" p = {compared['p_value_holm']:.2g} (Holm)"
    )


def _read_texts(path: Path) -> list[str]:
    """Return the lines of a text file, without their ends."""
    suffix = path.with_suffix("").suffix if path.suffix.lower() == ".gz" else path.suffix
    if suffix.lower() in (".json", ".jsonl", ".csv", ".parquet"):
        raise InputError(
            f"{path}: not a text file. Expected one text per line; score data files with `smelt eval`.",
            code="wrong-format",
            file=str(path),
        )
    with open_text(path, newline="\n") as stream:
        return [line.removesuffix("\n").removesuffix("\r") for line in read_lines(path, stream)]


def _require_references(path: Path, references: Sequence[Sequence[str]]) -> None:
    """Require that each text has a reference that is not blank.

    Raises:
        InputError: `missing-references`.
    """
    for number, texts in enumerate(references, start=1):
        if not any(text.strip() for text in texts):
            raise InputError(
                f"{path}:{number}: the reference is empty. Remove this line from every file.",
                code="missing-references",
                file=str(path),
                line=number,
            )


def _require_equal_counts(texts: dict[Path, list[str]]) -> None:
    """Require that all files have as many lines as the first one.

    Raises:
        InputError: `empty-data`, `count-mismatch`.
    """
    (first, expected), *others = ((path, len(lines)) for path, lines in texts.items())
    if not expected:
        raise InputError(
            f"{first}: no text to score; expected one per line.", code="empty-data", file=str(first)
        )
    for path, count in others:
        if count != expected:
            raise InputError(
                f"{path}: {count:,} lines, but {first} has {expected:,}. Line N of every file belongs to text"
                " N; a text must not contain a line end.",
                code="count-mismatch",
                file=str(path),
            )
