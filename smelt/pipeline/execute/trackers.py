"""Experiment trackers: one tracker run for each run, with every step's metrics, training curves, the report.

Names are `STEP/METRIC`: quality, size and latency of each step as in report.csv, and the curves of steps that
train (`train_loss`, `learning_rate`, `validation_loss`) by update. A step from the store is logged like a new
one, with the curve in its details. A tracker that fails is dropped with a warning; the run continues.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from smelt.core.artifact import Artifact
from smelt.core.messages import Message, warning
from smelt.pipeline.execute.run_result import step_row
from smelt.pipeline.recipe.recipe import TrackerName

if TYPE_CHECKING:
    from smelt.pipeline.execute.display import Display
    from smelt.pipeline.plan.plan import Plan

REPORT_FILES = ("recipe.yaml", "report.json", "report.md", "report.html", "report.csv")
TENSORBOARD_FOLDER = "tensorboard"  # in the run's folder
_MLFLOW_VALUE_LENGTH = 500  # oldest supported servers refuse longer parameters
_MAX_ERROR_LENGTH = 300


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker gets at the start of a run.

    project: the recipe's name; a tracker's own environment variable takes precedence. name: of the run.
    folder: the run's. config: what is run, and the paths of the artifacts to be made.
    """

    project: str
    name: str
    folder: Path
    config: Mapping[str, str]


class Tracker(Protocol):
    """One experiment tracker; the constructor starts its run. All methods may raise anything."""

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, step: str, metrics: dict[str, float], update: int) -> None:
        """Log a point of the curves of a step that trains."""

    def summarize(self, step: str, metrics: dict[str, float]) -> None:
        """Log the final values of a step; a later value replaces an earlier one."""

    def finish(self, files: Sequence[Path], status: str) -> None:
        """Log the files of the report, and end the run."""


class _TensorBoard:
    """Event files in the run's folder, or below `TENSORBOARD_LOGGING_DIR`."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        log_dir = os.environ.get("TENSORBOARD_LOGGING_DIR")
        folder = Path(log_dir).expanduser() / run.name if log_dir else run.folder / TENSORBOARD_FOLDER
        if not log_dir:
            shutil.rmtree(folder, ignore_errors=True)  # of a run whose report this one replaces
        self.writer = SummaryWriter(str(folder))
        self.writer.add_text("config", "\n\n".join(f"**{k}**: {v}" for k, v in run.config.items()))

    def log(self, step: str, metrics: dict[str, float], update: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(f"{step}/{name}", value, update)
        self.writer.flush()

    def summarize(self, step: str, metrics: dict[str, float]) -> None:
        self.log(step, metrics, 0)

    def finish(self, files: Sequence[Path], status: str) -> None:
        self.writer.add_text("status", status)
        self.writer.add_text("report", _read_markdown(files))
        self.writer.close()


class _MLflow:
    """A run of an MLflow experiment; its client leaves the active run of the process alone."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
        existing = self.client.get_experiment_by_name(name)
        experiment = self.client.create_experiment(name) if existing is None else existing.experiment_id
        self.run_id = self.client.create_run(experiment, run_name=run.name).info.run_id
        values = {_mlflow_name(key): value[:_MLFLOW_VALUE_LENGTH] for key, value in run.config.items()}
        self.client.log_batch(self.run_id, params=[Param(key, value) for key, value in values.items()])

    def log(self, step: str, metrics: dict[str, float], update: int) -> None:
        from mlflow.entities import Metric

        timestamp_ms = time.time_ns() // 1_000_000
        points = [Metric(_mlflow_name(f"{step}/{n}"), v, timestamp_ms, update) for n, v in metrics.items()]
        self.client.log_batch(self.run_id, metrics=points)

    def summarize(self, step: str, metrics: dict[str, float]) -> None:
        self.log(step, metrics, 0)

    def finish(self, files: Sequence[Path], status: str) -> None:
        for path in files:
            self.client.log_artifact(self.run_id, str(path))
        self.client.set_tag(self.run_id, "status", status)
        end_statuses = {"interrupted": "KILLED", "error": "FAILED"}
        self.client.set_terminated(self.run_id, end_statuses.get(status, "FINISHED"))


class _WandB:
    """A run of Weights & Biases. Final values are in its summary, files in its files."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.project,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
        )
        self.steps: set[str] = set()

    def log(self, step: str, metrics: dict[str, float], update: int) -> None:
        if step not in self.steps:  # each training has its own axis of updates
            self.steps.add(step)
            self.run.define_metric(f"{step}/*", step_metric=f"{step}/update")
        self.run.log({f"{step}/{name}": value for name, value in (metrics | {"update": update}).items()})

    def summarize(self, step: str, metrics: dict[str, float]) -> None:
        self.run.summary.update({f"{step}/{name}": value for name, value in metrics.items()})

    def finish(self, files: Sequence[Path], status: str) -> None:
        for path in files:
            self.run.save(str(path), base_path=str(path.parent), policy="now")
        self.run.summary.update({"status": status})
        self.run.finish(exit_code=int(status in ("error", "interrupted")))


class _SwanLab:
    """An experiment of SwanLab, with the report as text."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self.swanlab = swanlab
        swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT") or run.project,
            experiment_name=run.name,
            config=dict(run.config),
        )

    def log(self, step: str, metrics: dict[str, float], update: int) -> None:
        self.swanlab.log({f"{step}/{name}": value for name, value in metrics.items()}, step=update)

    def summarize(self, step: str, metrics: dict[str, float]) -> None:
        self.log(step, metrics, 0)

    def finish(self, files: Sequence[Path], status: str) -> None:
        self.swanlab.log({"report": self.swanlab.Text(_read_markdown(files), caption=status)})
        self.swanlab.finish()


class _Trackio:
    """A run of trackio, with the report as Markdown."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self.trackio = trackio
        project = os.environ.get("TRACKIO_PROJECT") or run.project
        trackio.init(project=project, name=run.name, config=dict(run.config), embed=False)

    def log(self, step: str, metrics: dict[str, float], update: int) -> None:
        self.trackio.log({f"{step}/{name}": value for name, value in metrics.items()}, step=update)

    def summarize(self, step: str, metrics: dict[str, float]) -> None:
        self.log(step, metrics, 0)

    def finish(self, files: Sequence[Path], status: str) -> None:
        self.trackio.log({"report": self.trackio.Markdown(f"status: {status}\n\n{_read_markdown(files)}")})
        self.trackio.finish()


TRACKERS: dict[TrackerName, type[Tracker]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "wandb": _WandB,
    "swanlab": _SwanLab,
    "trackio": _Trackio,
}


class RunTrackers:
    """The trackers of one run; no method raises."""

    def __init__(
        self, plan: Plan, folder: Path, display: Display, warn: Callable[[Sequence[Message]], object]
    ) -> None:
        """Start the trackers of the plan's recipe.

        Args:
            plan: of the run.
            folder: of the run.
            display: its log receives what trackers print.
            warn: receives the warning about a tracker that failed.
        """
        self._display, self._warn, self._folder = display, warn, folder
        self._live: dict[TrackerName, Tracker] = {}
        self._last_update: dict[str, int] = {}
        self._offset: dict[str, int] = {}
        self._curves: set[str] = set()
        self._values: dict[str, float] = {}
        run = TrackedRun(
            plan.path.stem, f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}", folder, _config(plan, folder)
        )
        for name in dict.fromkeys(plan.recipe.trackers):
            self._guard(name, partial(self._start, name, run))

    def _start(self, name: TrackerName, run: TrackedRun) -> None:
        self._live[name] = TRACKERS[name](run)

    def log(self, step: str, metrics: Mapping[str, float], update: int) -> None:
        """Log a point of the training curves of `step`; the updates of several trainings are added up."""
        self._curves.add(step)
        if update < self._last_update.get(step, 0):  # the next phase begins again at 0
            self._offset[step] = self._offset.get(step, 0) + self._last_update[step]
        self._last_update[step] = update
        total_updates = update + self._offset.get(step, 0)
        if finite := _finite(metrics):
            self._call("log", step, finite, total_updates)

    def log_cached(self, step: str, artifact: Artifact) -> None:
        """Log the training curves of an artifact from the store, as its training did."""
        details = artifact.manifest.details
        trainings = details.get("phases") or [details.get("training")]
        if not self._live or step in self._curves or not any(trainings):
            return
        from smelt.training.checkpoint_selector import log_training_curve

        for training in trainings:
            log_training_curve(training, lambda metrics, update: self.log(step, metrics, update))

    def summarize(self, report: Mapping[str, Any]) -> None:
        """Log the values of finished steps in a report that are new or have changed."""
        for entry in report["steps"] if self._live else ():
            values = {
                name: value for name, value in step_row(entry).items() if isinstance(value, int | float)
            }
            step = entry["name"]
            changed = {n: v for n, v in _finite(values).items() if self._values.get(f"{step}/{n}") != v}
            self._values |= {f"{step}/{name}": value for name, value in changed.items()}
            if changed:
                self._call("summarize", step, changed)

    def finish(self, status: str) -> None:
        """Log the files of the report and end the runs of all trackers."""
        files = [path for name in REPORT_FILES if (path := self._folder / name).is_file()]
        self._call("finish", files, status)
        self._live.clear()

    def _call(self, method: str, *arguments: Any) -> None:
        for name, tracker in [*self._live.items()]:
            self._guard(name, partial(getattr(tracker, method), *arguments))

    def _guard(self, name: TrackerName, work: Callable[[], object]) -> None:
        """Do work of one tracker; if it fails, drop the tracker with a warning."""
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                work()
        except Exception as error:
            self._live.pop(name, None)
            text = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_ERROR_LENGTH]
            self._warn(
                [
                    warning(
                        "tracker-failed",
                        f"The tracker {name} failed and gets nothing more of this run: {text}. Mend the cause"
                        " and run the recipe again: finished steps come from the store and are logged again.",
                        setting="trackers",
                    )
                ]
            )
        for line in printed.getvalue().splitlines():
            self._display.log_line(line)


def _config(plan: Plan, folder: Path) -> dict[str, str]:
    """Return what is run as texts: the recipe's keys, and the path of each step's artifact."""
    recipe = plan.recipe
    model = plan.recipe_dict().get("model")
    config = {"recipe": str(plan.path), "task": recipe.task, "model": str(model), "baseline": recipe.baseline}
    config |= {"seed": str(recipe.seed), "judged_on": plan.judged_on, "folder": str(folder)}
    names = ["model", *(step.name for step in plan.steps)]
    return config | {f"artifacts/{name}": str(folder / "artifacts" / name) for name in names}


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def _read_markdown(files: Sequence[Path]) -> str:
    return next((path.read_text(encoding="utf-8") for path in files if path.suffix == ".md"), "")
