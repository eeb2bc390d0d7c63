"""Write an artifact as a self-contained folder for deployment, for `smelt package`, in one of its formats.

The steps, scores and warnings in the package's README come from the report of the run that made the artifact.
A new format is one file and one line in `PACKAGE_FORMATS`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.api.scored_run import REPORT_FILE, find_run
from smelt.core.artifact import Artifact, read_artifact, read_manifest
from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import load_json
from smelt.core.messages import Message, warning
from smelt.data.tasks import task_traits
from smelt.export.package.compressed_tensors_format import CompressedTensorsFormat
from smelt.export.package.executorch_format import ExecutorchFormat
from smelt.export.package.genai import GenaiFormat
from smelt.export.package.gptq_awq_formats import AwqFormat, GptqFormat
from smelt.export.package.huggingface import HuggingFaceFormat
from smelt.export.package.litert_format import LitertFormat
from smelt.export.package.ncnn_format import NcnnFormat
from smelt.export.package.one_file_format import OneFileFormat
from smelt.export.package.optimum import OptimumFormat
from smelt.export.package.package_format import OriginScore, OriginStep, PackageFormat, PackageOrigin
from smelt.export.package.standalone_format import StandaloneFormat
from smelt.export.package.torch_export_format import TorchExportFormat
from smelt.export.package.transformers_js import TransformersJsFormat
from smelt.export.package.triton_format import TritonFormat
from smelt.runtimes.onnx_import.trial_run import require_safe_artifact

if TYPE_CHECKING:
    from smelt.evaluate.report.schema import ReportData
    from smelt.evaluate.report.step_schema import Quality
    from smelt.export.package.package_format import OriginScore, OriginStep, PackageOrigin
    from smelt.export.package.write_package import WrittenPackage


_MODEL_STEP = "model"


def run_artifacts(run: Path) -> dict[str, Artifact]:
    """Return the artifacts of a run by step, without missing or damaged ones."""
    artifacts = {}
    for path in sorted((run / "artifacts").glob("*")):
        try:
            artifacts[path.name] = Artifact(path.resolve(), read_manifest(path.resolve()))
        except InputError:
            continue
    return artifacts


def package_origin(artifact: Artifact, run: Path | None, step: str) -> PackageOrigin:
    """Return the origin of `artifact`, which is the step `step` of the run in the folder `run`."""
    from smelt.evaluate.report.schema import validate_report
    from smelt.evaluate.report.view import model_name

    if run is None:
        return PackageOrigin(license=_license(artifact.manifest.details))
    try:
        report = validate_report(load_json(run / REPORT_FILE))
    except (InputError, OSError, ValueError, RecursionError):
        return PackageOrigin(license=_license(artifact.manifest.details))
    root = run_artifacts(run).get(_MODEL_STEP)
    has_test_scores = any(entry.test for entry in report.steps if entry.name == step)
    split = "test" if has_test_scores else report.judged_on
    return PackageOrigin(
        run=str(report.recipe.get("name") or run.name),
        model=model_name(report),
        license=None if root is None else _license(root.manifest.details),
        steps=tuple(_package_steps(report, step)),
        scores=tuple(_package_scores(report, step)),
        latencies=tuple(_latency_lines(report, step)),
        data=_scored_data(report, split),
        split=split,
        warnings=tuple(_gate_warnings(report, step)),
        generation=dict((report.recipe.get("score") or {}).get("generation") or {}),
    )


def _gate_warnings(report: ReportData, step: str) -> Iterator[Message]:
    """Yield warnings for gates that failed, are undecided or were never judged, and for few samples."""
    from smelt.evaluate.report.verdict import limited_run_text
    from smelt.evaluate.report.view import gate_text, gate_value_text, gate_verdict

    if report.verdict is None or report.verdict.reason == "not-finished":
        names = ", ".join(report.recipe.get("gates") or ())
        gates = f"its gates ({names}) were never judged" if names else "its scores may be incomplete"
        yield warning(
            "run-not-finished",
            f"The run has not finished: {gates}. Run the recipe to its end, then package the step again.",
        )
    report_step = next(report_step for report_step in report.steps if report_step.name == step)
    for gate in report_step.gates:
        if gate.passed is not True or gate.undecided:
            measured_text = f": {gate_value_text(gate)}" if gate.value is not None else ""
            yield warning(
                "gate-not-kept", f"The gate {gate_text(gate)} is {gate_verdict(gate)}{measured_text}."
            )
    for gate in report_step.test.gates if report_step.test else ():
        if gate.passed is False:
            text = f"The gate {gate_text(gate)} failed on test: {gate_value_text(gate)}."
            yield warning("gate-not-kept-on-test", text)
    if trial := limited_run_text(report):
        yield warning("scored-on-few-rows", trial)


def _license(details: Mapping[str, Any]) -> str | None:
    license = details.get("license")
    return license if isinstance(license, str) else None


def _package_steps(report: ReportData, step: str) -> list[OriginStep]:
    """Return the steps from the model to `step`, with their settings in the recipe."""
    steps_by_name = {report_step.name: report_step for report_step in report.steps}
    origin_steps: list[OriginStep] = []
    step_name: str | None = step
    while step_name is not None:
        report_step = steps_by_name[step_name]
        origin_steps.append(
            OriginStep(report_step.name, report_step.stage, _recipe_settings(report, report_step.name))
        )
        step_name = report_step.parent
    return origin_steps[::-1]


def _recipe_settings(report: ReportData, step: str) -> Mapping[str, Any]:
    """Return the settings of a step in the recipe."""
    from smelt.evaluate.report.schema import STEP_KEYS

    for stage in report.recipe.get("stages") or ():
        entry = {stage: {}} if isinstance(stage, str) else stage
        stage_name = next((key for key in entry if key not in STEP_KEYS), "")
        if entry.get("name", stage_name) == step:
            return dict(entry[stage_name] or {})
    return {}


def _package_scores(report: ReportData, step: str) -> list[OriginScore]:
    from smelt.evaluate.report.view import metric_digits, metric_label

    report_step = next(report_step for report_step in report.steps if report_step.name == step)
    scores = (report_step.test or report_step).quality
    base = (
        {}
        if report.baseline_step is None or report.baseline == step
        else (
            report.baseline_step.test
            if report_step.test is not None and report.baseline_step.test is not None
            else report.baseline_step
        ).quality
    )

    def text(metric: str, quality: Quality) -> str:
        n = metric_digits(metric)
        interval_text = f" [{quality.ci95[0]:.{n}f}, {quality.ci95[1]:.{n}f}]" if quality.ci95 else ""
        return f"{quality.value:.{n}f}{interval_text}"

    return [
        OriginScore(
            metric_label(metric),
            text(metric, report_step),
            text(metric, base[metric]) if metric in base else None,
            report_step.n,
            report_step.signature,
            metric,
            report_step.value,
        )
        for metric, report_step in scores.items()
    ]


def _scored_data(report: ReportData, split: str) -> str | None:
    """Return the recipe's source of the scored split; None if it is not a string."""
    source = (report.recipe.get("data") or {}).get(split)
    source = source.get("path") or source.get("hub") if isinstance(source, dict) else source
    return source if isinstance(source, str) else None


def _latency_lines(report: ReportData, step: str) -> list[str]:
    """Return a line for each measured batch size."""
    from smelt.evaluate.report.view import hardware

    lines = []
    for row in next(report_step for report_step in report.steps if report_step.name == step).latency:
        text = f"{row.p50_ms:.3g} ms (median) at batch {row.batch_size}, threads: {row.threads or 'all'}"
        if row.stable and row.speedup and row.speedup_ci95 and step != report.baseline:
            low, high = row.speedup_ci95
            text += f": {row.speedup:.2f} times as fast as {report.baseline} [{low:.2f}, {high:.2f}]"
        text += "" if row.stable is not False else " (measurement disturbed by other processes)"
        lines.append(f"{text}; {hardware(report)}")
    return lines


_KEY_DIGITS = 12  # digits of a key


def package_artifact(
    source: str | PathLike[str], format: str = "standalone", out: str | PathLike[str] | None = None
) -> WrittenPackage:
    """Write the artifact `source` as a package in `format`.

    Args:
        source: the folder of an artifact: in a run (runs/x/artifacts/NAME), in a store, or a copy.
        format: layout; see `smelt package --help`.
        out: the folder to write (default: NAME-FORMAT in the current folder).

    Raises:
        InputError: no such artifact or format, the format does not support it, or `out` cannot be written.
        RunError: the disk is full, or the package failed its checks.
    """
    from smelt.export.package.write_package import require_empty_destination, require_supported, write_package

    if out is not None and not os.fspath(out).strip():
        raise InputError("--out: empty. Set it to the folder to write, or remove --out.", code="empty-text")
    path, package_format = Path(source).expanduser(), find_package_format(format)
    artifact = read_artifact(path)
    if task_traits(artifact.manifest.task).modality == "arrays":
        raise InputError(
            f"{source}: an artifact for task: {artifact.manifest.task} needs no package; ONNX Runtime opens"
            f" its model.onnx directly. Copy the folder: cp -rL {shlex.quote(str(source))} NEW",
            code="nothing-to-do",
        )
    run = find_run(path, artifact)
    other_steps = {} if run is None else {n: a for n, a in run_artifacts(run[0]).items() if n != run[1]}
    require_supported(package_format, artifact, str(source), PACKAGE_FORMATS.values(), other_steps)
    name = path.absolute().name if run is None else run[1]
    name = name[:_KEY_DIGITS] if name == artifact.key else name
    folder = Path(f"{name}-{format}") if out is None else Path(out).expanduser()
    require_empty_destination(folder)
    _require_outside(folder, artifact)
    artifact.verify()
    require_safe_artifact(artifact, trust_engine=True)  # an engine is copied, not run
    origin = package_origin(artifact, None if run is None else run[0], name)
    return write_package(package_format, artifact, origin, folder)


def package_lines(package: WrittenPackage) -> list[str]:
    """Return the output of `smelt package`: the folder, its size, and how to install and run it."""
    folder = shlex.quote(str(package.folder))
    return [
        f"Wrote {package.folder} ({package.size_bytes:,} bytes). See its README.md for how to use it.",
        f"Install its requirements: (cd {folder} && {package.usage.install})",
        f"Run it: (cd {folder} && {package.usage.run})",
        *(f"warning: {message}" for message in package.warnings),
    ]


def _require_outside(folder: Path, artifact: Artifact) -> None:
    """Require that the package is not written inside an artifact or a run's artifacts.

    Raises:
        InputError: it would become a part of an artifact, or the next run would remove it.
    """
    target = folder.absolute()
    if target.resolve().is_relative_to(artifact.path):
        raise InputError(
            f"{folder}: inside the artifact itself. Choose another --out.",
            code="inside-artifact",
            file=str(folder),
        )
    if target.parent.name == "artifacts" and (target.parent.parent / "recipe.yaml").is_file():
        raise InputError(
            f"{folder}: the next run in {target.parent.parent} would remove it from 'artifacts'. Choose"
            " another --out.",
            code="inside-run",
            file=str(folder),
        )


PACKAGE_FORMATS: dict[str, PackageFormat] = {
    form.name: form
    for form in (
        StandaloneFormat(), OneFileFormat(), OptimumFormat(), TransformersJsFormat(), GenaiFormat(),
        TritonFormat(), HuggingFaceFormat(), CompressedTensorsFormat(), GptqFormat(), AwqFormat(),
        TorchExportFormat(), ExecutorchFormat(), LitertFormat(), NcnnFormat(),
    )
}  # fmt: skip


def find_package_format(name: str) -> PackageFormat:
    """Return the format `name`.

    Raises:
        InputError: there is none.
    """
    if name not in PACKAGE_FORMATS:
        raise InputError(
            f"unknown package format '{name}'. Available:"
            f" {', '.join(PACKAGE_FORMATS)}.{did_you_mean(name, PACKAGE_FORMATS)}",
            code="unknown-package-format",
        )
    return PACKAGE_FORMATS[name]
