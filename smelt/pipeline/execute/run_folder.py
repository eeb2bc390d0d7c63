"""A run's folder (recipe, report, links to the store, results of an earlier run), and the runs of a store.

The result of a run is its report, the files written to its folder, and the summary on the terminal.

A run with `--until` runs a part of the recipe. Artifacts of the other steps from an earlier run in the same
folder are kept if they still match the recipe, and are marked in the report. Their links protect them from
`smelt store clean`.

A run uses the artifacts that its `artifacts` folder links to. So that `smelt store` can identify unused
files, runs next to the store are found by their folders, all others by a record in the store,
`runs/HASH.json`; a marker next to it shows an active run.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact, broken_link_problem
from smelt.core.errors import InputError, MissingDependencyError, did_you_mean
from smelt.core.files import (
    json_hash,
    load_json,
    partial_files,
    read_hashed_json,
    write_atomically,
    write_hashed_json,
)
from smelt.core.locks import file_lock, heartbeat, is_active
from smelt.core.messages import escape_controls
from smelt.core.remote_store import RemoteStore, is_store_url, open_remote_store
from smelt.core.store import Store
from smelt.core.system import interrupted_exit_code
from smelt.core.user_code import copy_user_code
from smelt.core.workspaces import OWNER_SUFFIX
from smelt.evaluate.report.chart import CHART_FILES, chart_files
from smelt.evaluate.report.render import render_html, render_table
from smelt.evaluate.report.schema import SCORES_FOLDER, read_report, validate_report
from smelt.evaluate.report.view import find_task

if TYPE_CHECKING:
    from smelt.pipeline.execute.step_runner import StepRunner
    from smelt.pipeline.plan.plan import Plan


EXIT_CODES = {"passed": 0, "error": 1, "gate-failed": 3}
NOT_COPIED_EXIT_CODE = 4  # passed, but the remote store lacks results


class Report(Mapping[str, Any]):
    """The report of a run, a read-only mapping with the content of report.json (docs/reference/report.md).

    Notebooks display it as the HTML report.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:

        validate_report(data)
        self.data = dict(data)

    @classmethod
    def read(cls, run: str | PathLike[str]) -> Report:
        """Read the report of the run in the folder `run`, or the report.json at that path.

        Raises:
            InputError: there is no report, or this version of smelt cannot read it.
        """
        return cls(read_report(Path(run).expanduser()))

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per step.

        Columns: step, stage, parent, status, format, target, parameters, operations, size_bytes; for each
        metric its value, `_difference` from the baseline, `_p_value` and `_p_value_holm`; `same_outputs`
        (percent), `agreement_bleu`, `agreement_chrf`, `kl_divergence` with the baseline's outputs; for each
        measured batch size `latency_ms_N` (p50, milliseconds) and `speedup_N`.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise MissingDependencyError(
                "to_frame needs pandas: pip install 'smelt[notebook]'", code="not-installed"
            ) from error

        return pandas.DataFrame([step_row(step) for step in self.data["steps"]]).set_index("step")

    def _repr_html_(self) -> str:

        page = escape(render_html(self.data), quote=True)
        return (
            f'<iframe srcdoc="{page}" style="width: 100%; height: 720px; border: 0" title="report"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Report({self.data['recipe'].get('name', 'run')!r}, {self.data['status']!r})"

    def __str__(self) -> str:

        return render_table(self.data)

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


_AGREEMENT_COLUMNS = {
    "equal": "same_outputs",
    "bleu": "agreement_bleu",
    "chrf": "agreement_chrf",
    "kl_divergence": "kl_divergence",
}


def step_row(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step of a report as a flat row."""
    copied_keys = ("stage", "parent", "status", "format", "target", "parameters", "operations", "size_bytes")
    row: dict[str, Any] = {"step": step["name"], **{name: step.get(name) for name in copied_keys}}
    for metric, score in (step["quality"] or {}).items():
        row[metric] = score["value"]
        row |= {f"{metric}_{part}": value for part, value in (score.get("parts") or {}).items()}
        if test := (step["against_baseline"] or {}).get(metric):
            row |= {
                f"{metric}_difference": test["difference"],
                f"{metric}_p_value": test["p_value"],
                f"{metric}_p_value_holm": test.get("p_value_holm"),
            }
    for name, value in (step.get("agreement") or {}).items():
        if name in _AGREEMENT_COLUMNS and value is not None:
            row[_AGREEMENT_COLUMNS[name]] = value
    if (layers := step.get("layer_sqnr")) and layers["output_sqnr_db"] is not None:
        row["output_sqnr_db"] = layers["output_sqnr_db"]
    for latency in step["latency"] or []:
        row[f"latency_ms_{latency['batch_size']}"] = latency["p50_ms"]
        row[f"speedup_{latency['batch_size']}"] = latency["speedup"]
    return row


def report_csv(report: Mapping[str, Any]) -> str:
    """Return the table of `Report.to_frame` as CSV, with a line for each step."""
    rows = [step_row(step) for step in report["steps"]]
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_csv_cell, names))
    writer.writerows([_csv_cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    """Return a text without control characters, and with an apostrophe before what starts a formula.

    Source: CSV injection, OWASP. Spreadsheets compute cells that begin with one of these characters.
    """
    if not isinstance(value, str):
        return value
    text = escape_controls(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text


@dataclass
class Result:
    """The result of a run: report (see docs/reference/report.md), folder and exit code.

    not_copied: the number of results that the remote store lacks.
    """

    report: Report
    folder: Path
    not_copied: int = 0
    exit_code: int = field(init=False)

    def __post_init__(self) -> None:
        status = self.report["status"]
        self.exit_code = interrupted_exit_code() if status == "interrupted" else EXIT_CODES[status]
        if self.not_copied and not self.exit_code:
            self.exit_code = NOT_COPIED_EXIT_CODE

    def __repr__(self) -> str:
        """Return a short form without the report: name, status and folder."""
        name = self.report["recipe"].get("name", "run")
        return f"Result({name!r}, {self.report['status']!r}, {str(self.folder)!r})"

    def artifact(self, step: str) -> Path:
        """Return the folder of the artifact of `step`, for `smelt.load`.

        Raises:
            InputError: no such step, or it has no artifact.
        """
        folder = self.folder / "artifacts" / step
        available = [s["name"] for s in self.report["steps"] if s["artifact"]]
        if step not in available or not folder.is_dir():
            names = ", ".join(available)
            raise InputError(
                f"no artifact of a step '{step}'. Available steps: {names}.{did_you_mean(step, available)}",
                code="no-artifact",
            )
        return folder


def write_report(
    folder: Path, report: Mapping[str, Any], with_charts: bool = True, with_pages: bool = True
) -> None:
    """Write the report to `folder`: report.json, and with pages .md, .html and .csv.

    with_charts: with charts, also as files.
    """
    from smelt.evaluate.report.markdown import render_markdown

    write_atomically(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    if not with_pages:
        return
    write_atomically(folder / "report.md", render_markdown(report))
    write_atomically(folder / "report.html", render_html(report, with_charts))
    write_atomically(folder / "report.csv", report_csv(report))
    if with_charts:
        charts = chart_files(validate_report(report))
        for name in set(CHART_FILES) - charts.keys():
            (folder / name).unlink(missing_ok=True)
        for name, content in charts.items():
            write_atomically(folder / name, content)


def summary_lines(result: Result) -> Sequence[str]:
    """Return the final output of `smelt run`: the table, the report's path, and commands to try and deploy.

    Without the commands where the verdict recommends no step.
    """
    from smelt.evaluate.report.verdict import ship_command

    lines = [render_table(result.report), "", f"Report: {_short_path(result.folder / 'report.html')}"]
    report = validate_report(result.report)
    links = [result.folder / "artifacts" / step.name for step in report.steps if step.artifact]
    problems = ((link, problem) for link in links if (problem := broken_link_problem(link)) is not None)
    if (first_problem := next(problems, None)) is not None:  # no command with these artifacts would work
        return [*lines, f"{_short_path(first_problem[0])}: {first_problem[1][1]}"]
    step = next((step for step in report.steps if report.verdict and step.name == report.verdict.step), None)
    if step is None:
        return lines
    folder = _short_path(result.folder / "artifacts" / step.name)
    example_input = find_task(report).command_input
    return [
        *lines,
        f"Try it: smelt predict {shlex.quote(folder)} {example_input}",
        f"Ship it: {ship_command(report, step, folder)}",
    ]


def _short_path(path: Path) -> str:
    """Return `path`, relative to the current folder if it is inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@dataclass(frozen=True)
class StoreRun:
    """A run that uses the store.

    folder: the run's folder. steps: keys of its linked artifacts by step name. busy: whether it is active.
    """

    folder: Path
    steps: dict[str, str]
    busy: bool


StorePlace = Path | str
"""A folder, or the URL of a remote store as text."""


def store_place(text: str | Path) -> StorePlace:
    """Return the value of `--store` as a folder or URL."""
    return text if isinstance(text, str) and is_store_url(text) else Path(text)


def check_store(location: StorePlace | None) -> None:
    """Check that a remote store can be used; a folder is not checked.

    Raises:
        InputError: it cannot be used; as `open_remote_store`.
    """
    if isinstance(location, str):
        open_remote_store(location)


def open_store(
    location: StorePlace | None, folder: Path, cache: Path | None = None, push_checkpoints: bool = False
) -> tuple[Store, str]:
    """Return the store of a run in `folder`, and a note if it is a new one, or not that of an earlier run.

    Args:
        location: as given by the user; None: the default.
        folder: the run's folder.
        cache: local folder of a remote store; None: the default store.
        push_checkpoints: whether checkpoints are copied to the remote store.

    Raises:
        InputError: it cannot be used, or checkpoints are to be copied without a remote store.
    """
    if push_checkpoints and not isinstance(location, str):
        raise InputError(
            "--push-checkpoints: needs a bucket to copy checkpoints to. Set --store URL, such as"
            " s3://bucket/smelt.",
            code="no-remote-store",
        )
    if isinstance(location, Path):
        store = Store(location)
        return store, moved_run_text(folder, store.root)
    remote = None if location is None else open_remote_store(location)
    local_root, store_note = (cache, "") if cache else default_store(folder)
    store = _open_default_store(local_root, remote, folder)
    store.pushes_checkpoints = push_checkpoints
    return store, store_note if remote is not None else store_note or moved_run_text(folder, store.root)


def _open_default_store(local: Path, remote: RemoteStore | None, folder: Path) -> Store:
    """Return the default store `local`; an error names `--out` if the store is new, next to the run."""
    try:
        return Store(local, remote)
    except InputError as error:
        cause = error.__cause__
        if local.parent != folder.parent or local.is_dir() or not isinstance(cause, OSError):
            raise
        raise InputError(
            f"{folder.parent}: cannot be used for a run: {cause.strerror}. Choose another folder with --out.",
            code="unusable-folder",
        ) from error


def default_store(folder: Path) -> tuple[Path, str]:
    """Return the default store of a run in `folder`, and a note if that is a new one.

    The default is the nearest `.store` of the same user in a parent folder, else `.store` next to the run.
    """
    for parent in folder.parents:
        root = parent / ".store"
        if all((root / subfolder).is_dir() for subfolder in ("artifacts", "scores")) and _is_owned(root):
            return root, ""
    root = folder.parent / ".store"
    local = Path("runs", ".store").resolve()
    if not local.is_dir():
        return root, ""
    return root, (
        f"Using a new store in {root}; artifacts of runs in {local.parent} are not reused. To share them, use"
        f" --store {local}."
    )


def moved_run_text(folder: Path, store: Path) -> str:
    """Return a warning if the earlier run in `folder` links to a store that is missing, else "".

    store: of the next run, in which they may be.
    """
    for link in sorted((folder / "artifacts").glob("*")):
        stored = store / "artifacts" / Path(os.path.realpath(link)).name
        problem = broken_link_problem(link)
        if problem is not None and problem[0] == "moved-run" and not stored.is_dir():
            return f"{link}: {problem[1]}"
    return ""


def _is_owned(root: Path) -> bool:
    return not hasattr(os, "getuid") or root.stat().st_uid == os.getuid()


@contextmanager
def register_run(store: Path, folder: Path) -> Iterator[None]:
    """Register the run in `folder` with the store at `store`, as active until this context exits.

    In a store that cannot be written to no run is registered.
    """
    if not os.access(store / "tmp", os.W_OK):
        yield
        return
    record_path = store / "runs" / f"{json_hash(str(folder))[:32]}.json"
    record_path.parent.mkdir(exist_ok=True)
    with ExitStack() as stack:
        with cleaning_lock(store):  # waits until a running `smelt store clean` has finished
            if read_hashed_json(record_path) is None:
                write_hashed_json(record_path, {"folder": str(folder)})
            stack.enter_context(heartbeat(record_path.with_suffix(OWNER_SUFFIX)))
        yield


def run_folder_lock(folder: Path) -> AbstractContextManager[None]:
    """Return the lock of a run in `folder`; entering it raises `folder-in-use` if another run has it."""

    def refuse(holder: str) -> None:
        raise InputError(
            f"{folder}: {holder} is running in this folder. Choose another folder with --out, or wait.",
            code="folder-in-use",
            file=str(folder),
        )

    return file_lock(folder / ".lock", refuse)


def cleaning_lock(store: Path) -> AbstractContextManager[None]:
    """Return the lock that prevents runs from starting while the store at `store` is cleaned."""
    return file_lock(store / "locks" / "clean.lock")


def list_runs(store: Path) -> list[StoreRun]:
    """Return the known runs that use the store at `store`, sorted by folder."""
    folders = {path.parent.resolve() for path in store.parent.glob("*/artifacts") if path.is_dir()}
    active_folders = set()
    for record_path in sorted((store / "runs").glob("*.json")):
        if (record := read_hashed_json(record_path)) is None:
            continue  # see `damaged_run_records`
        folder = Path(record["folder"])
        folders.add(folder)
        marker = record_path.with_suffix(OWNER_SUFFIX)
        if marker.exists() and is_active(marker):
            active_folders.add(folder)
    runs = [StoreRun(folder, linked_keys(store, folder), folder in active_folders) for folder in folders]
    return sorted((run for run in runs if run.steps or run.busy), key=lambda run: str(run.folder))


def damaged_run_records(store: Path) -> list[Path]:
    """Return the records of runs that cannot be read, so that the folders of these runs are unknown."""
    return [note for note in sorted((store / "runs").glob("*.json")) if read_hashed_json(note) is None]


def linked_keys(store: Path, folder: Path) -> dict[str, str]:
    """Return the keys of the artifacts in `store` that a run links to, by step, including missing ones."""
    artifacts_folder = (store / "artifacts").resolve()
    keys = {}
    for link in sorted((folder / "artifacts").glob("*")):
        target = link.resolve()
        if link.is_symlink() and target.parent == artifacts_folder:
            keys[link.name] = target.name
    return keys


_LOG_FILE = "log.txt"
# Files of a run that was killed right after its start.
_INITIAL_FILES = {".lock", _LOG_FILE}
_REPORT_FILES = ("report.json", "report.md", "report.html", "report.csv", *CHART_FILES)


def require_run_folder(folder: Path) -> None:
    """Require that `folder` is empty or of a run, as a run removes and overwrites files in it.

    Raises:
        InputError: it is not (`not-a-run`).
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names - _INITIAL_FILES and not names >= {_LOG_FILE, "recipe.yaml"}:
        shown = ", ".join(sorted(names - _INITIAL_FILES)[:3])
        raise InputError(
            f"{folder}: not empty and not the folder of a run (contains {shown}). A run would overwrite its"
            " files. Choose another folder with --out.",
            code="not-a-run",
        )


@dataclass
class RunFolder:
    """The folder of one run. previous_keys: keys of an earlier run's artifacts that may be kept, by step."""

    path: Path
    previous_keys: dict[str, str] = field(default_factory=dict)

    def replaced_recipe(self, plan: Plan) -> str | None:
        """Return the name of another recipe whose report will be replaced; None if there is none."""
        try:
            name = load_json(self.path / "report.json")["recipe"]["name"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return name if isinstance(name, str) and name != plan.path.stem else None

    def prepare(self, plan: Plan, store: Path) -> None:
        """Remove an earlier run's report, unless it describes steps excluded by `--until`; write the recipe.

        The links of the earlier run are kept until this one has replaced them or has ended.

        Raises:
            OSError: the folder cannot be written to.
        """
        links = linked_keys(store, self.path) if plan.excluded_steps else {}
        self.previous_keys = {
            step.name: links[step.name] for step in plan.excluded_steps if step.name in links
        }
        for scores in (self.path / SCORES_FOLDER).glob("*.json.gz"):
            if scores.name.removesuffix(".json.gz") not in self.previous_keys:
                scores.unlink()
        if not self.previous_keys:  # else the report describes kept artifacts until this run replaces it
            for name in _REPORT_FILES:
                (self.path / name).unlink(missing_ok=True)
        for partial_path in partial_files(self.path):
            partial_path.unlink(missing_ok=True)  # left by a killed run; this run has the folder locked
        copy_user_code(plan.user_functions, plan.recipe.base, self.path)
        write_atomically(self.path / "recipe.yaml", plan.portable_recipe())

    def write_scores(self, name: str, score: Mapping[str, Any]) -> None:
        """Write the statistics per sample and the outputs of a scored step, for `smelt compare`."""
        values = {key: score[key] for key in ("statistics", "predictions", "labels") if key in score}
        content = gzip.compress(json.dumps(values, ensure_ascii=False).encode("utf-8"), mtime=0)
        write_atomically(self.path / SCORES_FOLDER / f"{name}.json.gz", content)

    def link_artifact(self, name: str, artifact: Artifact) -> None:
        """Create the link `artifacts/NAME` to `artifact`, or replace it."""
        link = self.path / "artifacts" / name
        link.parent.mkdir(exist_ok=True)
        if link.is_dir() and not link.is_symlink():
            shutil.rmtree(link)
        new_link = link.with_name(f".{name}.part")
        new_link.unlink(missing_ok=True)
        os.symlink(os.path.relpath(artifact.path, link.parent), new_link)
        os.replace(new_link, link)

    def remove_old_links(self, names: Iterable[str]) -> None:
        """Remove the links of an earlier run except those of the steps `names` and of excluded steps."""
        linked_names = {*names, *self.previous_keys}
        artifacts = self.path / "artifacts"
        for link in artifacts.iterdir() if artifacts.is_dir() else ():
            if link.name not in linked_names:
                _remove(link)

    def keep_previous(
        self, plan: Plan, shop: StepRunner, done: Mapping[str, Artifact]
    ) -> dict[str, Artifact]:
        """Return an earlier run's artifacts of excluded steps that still match the recipe, by step.

        Links to other artifacts are removed. A link is also kept if its step cannot be checked because a step
        that it depends on failed in this run.

        Args:
            plan: plan of this run.
            shop: step runner of this run.
            done: artifacts of this run, by step.
        """
        available, previous, stale_names = dict(done), dict[str, Artifact](), set[str]()
        for step in plan.excluded_steps:
            missing = [name for name in step.dependencies if name not in available]
            if missing:
                stale_names |= {step.name} if stale_names.intersection(missing) else set()
                continue
            artifact = None
            if shop.step_key(step, available) == self.previous_keys.get(step.name):
                artifact = _find_artifact(shop, self.previous_keys[step.name])
            if artifact is None:
                stale_names.add(step.name)
            else:
                available[step.name] = previous[step.name] = artifact
        for name in stale_names:
            self.previous_keys.pop(name, None)
            (self.path / "artifacts" / name).unlink(missing_ok=True)
            (self.path / SCORES_FOLDER / f"{name}.json.gz").unlink(missing_ok=True)
        return previous


def _find_artifact(step_runner: StepRunner, key: str) -> Artifact | None:
    """Return the artifact; None if it is missing or damaged."""
    try:
        return step_runner.store.find(key)
    except InputError:
        return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
