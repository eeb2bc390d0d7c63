"""From a recipe to a folder with report and artifacts: the main job of smelt."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import Artifact
from smelt.core.data import CUSTOM, Split
from smelt.core.errors import UNNAMED, InputError, SmeltError, panics_explained
from smelt.core.messages import Message
from smelt.core.shares import limited
from smelt.core.store.locks import lock
from smelt.core.store.store import Store
from smelt.execute.display import Display, duration
from smelt.execute.failures import explain, of_the_user, trace
from smelt.execute.latency_scores import LatencyScores
from smelt.execute.report_data import ReportBuilder
from smelt.execute.roots.begin import begin
from smelt.execute.run_folder import RunFolder, require_runs_folder
from smelt.execute.run_result import Report, Result, chosen, write_report
from smelt.execute.scoring import Scorer
from smelt.execute.steps import Workshop
from smelt.execute.store_runs import at_work, place_of_store
from smelt.look.machine import unscored_reason
from smelt.planning.untrained import NOT_SCORED
from smelt.planning.warnings import data_warnings, few_windows
from smelt.recipe.recipe import SPEEDS

if TYPE_CHECKING:
    from smelt.evaluate.latency import LatencySettings
    from smelt.planning.plan import Plan, Step

ROOT = "model"
_NOT_ASKED = "scores were not asked for"
# Seconds that taking times may need, however little the stages took.
_SHORTEST = 60.0


@dataclass(frozen=True)
class Options:
    """What the command line adds to a recipe.

    out: the run's folder (default: runs/NAME beside the current folder). store: where artifacts and
    scores are kept (default: the nearest .store in a folder above, else one beside the run's folder).
    fresh: steps to be built anew, {"*"} for all. limit: use so many rows of every split. scored: whether
    quality and latency are measured.
    """

    out: Path | None = None
    store: Path | None = None
    rebuild: frozenset[str] = frozenset()
    limit: int | None = None
    quiet: bool = False
    scored: bool = True


def run_plan(plan: Plan, options: Options) -> Result:
    """Carry out `plan`. The report is written before the first step and after each, so also if it is killed.

    Raises:
        InputError: what can be known before any work is done; nothing has been written then.
    """
    plan.require_runnable()
    unknown = options.rebuild - {"*", ROOT} - {s.name for s in plan.steps}
    if unknown:
        known = ", ".join(s.name for s in plan.steps)
        raise InputError(
            f"--rebuild {', '.join(sorted(unknown))}: no such step; there are {known}.", code="unknown-step"
        )
    options = replace(options, limit=_rows(options.limit))
    whole = plan.read_data()
    data = {name: limited(split, options.limit) for name, split in whole.items()}
    folder = (options.out or Path("runs") / plan.path.stem).resolve()
    require_runs_folder(folder)
    place, new_store = (options.store, "") if options.store else place_of_store(folder)
    store = Store(place)
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock(folder / ".lock", partial(_refuse, folder)))
            stack.enter_context(at_work(store.root, folder))
            display = Display(folder / "log.txt", quiet=options.quiet)
        except OSError as error:
            raise InputError(
                f"{error.filename or folder}: cannot be used for the run: {error.strerror}."
                " Give another folder with --out.",
                code="unusable-folder",
            ) from error
        stack.callback(display.close)
        if any(step.needs & {"train", "unlabelled", "calibration"} for step in plan.steps):
            from smelt.compress.train.state import denormals_as_zero

            stack.enter_context(denormals_as_zero())
        if new_store:
            display.line(f"note: {new_store}")
        run = _Run(plan, options, whole, data, folder, store, display)
        run.warn(data_warnings(plan.recipe, any(step.trains for step in plan.steps), whole))
        return run.go()


def _told(failure: SmeltError) -> str:
    """Return an error as a line of the log."""
    return f"error[{failure.code or UNNAMED}]: {failure}"


def _rows(limit: Any) -> int | None:
    """Return a limit as a number of rows.

    Raises:
        InputError: it is something else.
    """
    if limit is None:
        return None
    with suppress(TypeError):
        if not isinstance(limit, bool) and (rows := operator.index(limit)) >= 1:
            return rows
    raise InputError(
        f"limit: expected how many rows of every split, 1 or more, read {limit!r}.",
        code="wrong-value",
        setting="limit",
    )


def _refuse(folder: Path, holder: str) -> None:
    """Say that the folder of a run belongs to one run at a time.

    Raises:
        InputError: always.
    """
    raise InputError(
        f"{folder}: {holder} is working on a run in this folder. Give another one with --out.",
        code="folder-in-use",
        file=str(folder),
    )


class _Run:
    """The state of one run; `go` is its story."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        whole: dict[str, Split],
        data: dict[str, Split],
        folder: Path,
        store: Store,
        display: Display,
    ) -> None:
        recipe = plan.recipe
        self.plan, self.options, self.whole, self.data = plan, options, whole, data
        self.folder, self.store, self.display = folder, store, display
        self.place = RunFolder(folder)
        score = recipe.score
        self.scorer = Scorer(
            store,
            recipe.task,
            score.quality,
            score.generation,
            score.batch_size,
            recipe.threads,
            recipe.truncation,
            recipe.device,
            recipe.tokenize,
        )
        self.shop = Workshop(
            store,
            recipe.task,
            data,
            recipe.seed,
            recipe.threads,
            self.scorer,
            display,
            device=recipe.device,
            windows=recipe.data.windows if recipe.task == "language-modeling" else None,
        )
        self.artifacts: dict[str, Artifact] = {}
        self.kept: dict[str, Artifact] = {}
        self.report = ReportBuilder(plan, data, options.limit)

    def warn(self, found: Sequence[Message]) -> None:
        """Take what a person should know into the report; say what the plan could not."""
        for message in found:
            if self.report.warn(message):
                self.display.line(f"{message.severity}: {message}")

    def go(self) -> Result:
        """Work through the tree; whatever happens, the report tells it."""
        started = time.monotonic()
        self._begin()
        try:
            with panics_explained():
                self._root()
            for step in self.plan.steps:
                self._step(step)
            self._earlier()
            if self.options.scored:
                self._latency()
                self.report.judge()
                self._test()
            self.report.finish()
        except KeyboardInterrupt:
            self.report.interrupted()
            self.display.line("Interrupted. Finished steps are kept; run the same command to go on.")
        except Exception as error:
            failure = self._explain(error, ROOT)
            if isinstance(failure, InputError) and not self.artifacts:
                raise  # nothing was done yet: a matter of input, not of the run
            self.report.failed(failure)
            self.display.line(_told(failure))
        self._write_report(last=True)
        self.display.line(f"{self.report.status} in {duration(time.monotonic() - started)}")
        return Result(Report(self.report.data), self.folder)

    def _begin(self) -> None:
        if name := self.place.replaced(self.plan):
            self.display.line(
                f"note: the report of '{name}' in {self.folder} is replaced; its artifacts stay in the store."
            )
        try:
            self.place.begin(self.plan, self.store.root)
        except OSError as error:
            raise explain(error, "recipe.yaml", self.folder, self.display.log_path) from error

    def _root(self) -> None:
        self.display.begin(ROOT)
        begun = begin(
            self.plan, self.whole, self.data, self.shop, self.scorer, self.warn, self._is_fresh(ROOT)
        )
        self.shop, self.scorer = begun.shop, begun.scorer
        self._finished(ROOT, begun.artifact, begun.cached, 0.0)
        self._write_report()  # the first step may be a long training

    def _step(self, step: Step) -> None:
        if step.unavailable:
            self.report.skipped(step.name, step.unavailable)
            self.display.line(f"{step.name}: skipped: {step.unavailable}")
            return
        missing = [name for name in step.stands_on if name not in self.artifacts]
        if missing:
            self.report.not_reached(step.name, f"step '{missing[0]}', which it needs, gave no artifact")
            return
        self.display.begin(step.name)
        started = time.monotonic()
        try:
            with panics_explained():
                above = {name: self.artifacts[name] for name in self.plan.above(step)}
                artifact, cached = self.shop.run_step(step, above, self._is_fresh(step.name))
                self._finished(step.name, artifact, cached, time.monotonic() - started)
        except Exception as error:
            failure = self._explain(error, step.name)
            self.report.failed(failure, step.name)
            self.display.line(f"{step.name}: {_told(failure)}")
        self._write_report()

    def _explain(self, error: Exception, step: str) -> SmeltError:
        """Return what to tell the user of `error`; the log gets the traceback of what nobody foresaw."""
        failure = explain(error, step, self.store.root, self.display.log_path)
        given = self.plan.local_model if step == ROOT else None
        failure = of_the_user(failure, self.store.root, given, self.artifacts)
        for line in trace(error).splitlines():
            self.display.record(line)
        return failure

    def _finished(self, name: str, artifact: Artifact, cached: bool, seconds: float) -> None:
        """Link, score and report a finished artifact."""
        self.place.link(name, artifact)
        untrained = NOT_SCORED if artifact.manifest.details.get("untrained") else None
        if reason := untrained or _unscored(artifact) or (None if self.options.scored else _NOT_ASKED):
            self.artifacts[name] = artifact
            self.report.unscored(name, artifact, reason, cached)
            took = "from the store" if cached else duration(seconds)
            self.display.line(f"{name}: {took}; {artifact.size_bytes / 1e6:.1f} MB; not scored: {reason}")
            return
        if name == (ROOT if self.plan.recipe.task == CUSTOM else self.plan.recipe.baseline):
            self.scorer = replace(self.scorer, reference=artifact)
        score = self._score(name, artifact)
        self.artifacts[name] = artifact
        self.report.done(name, artifact, score, cached)
        if name == self.plan.recipe.baseline and self.options.limit is None:
            self.warn(few_windows(score["statistics"], self.plan.judged_on))
        if name == self.plan.recipe.baseline and self.scorer.compares:
            for other in [n for n in self.report.statistics if n != name]:  # scored before it was there
                self.report.rescored(other, self.artifacts[other], self._score(other, self.artifacts[other]))
        took = "from the store" if cached else duration(seconds)
        first = "".join(f"{metric} {s['value']:.2f}, " for metric, s in [*score["quality"].items()][:1])
        self.display.line(f"{name}: {took}; {first}{artifact.size_bytes / 1e6:.1f} MB")

    def _score(self, name: str, artifact: Artifact, on_test: bool = False) -> dict[str, Any]:
        self.display.begin(f"{name}, scoring{' on test' if on_test else ''}")
        split = self.data["test" if on_test else self.plan.judged_on]
        with self.store.lock(f"{artifact.key}-score", self._waits(name)):
            return self.scorer.score(artifact, split, self.display.progress)

    def _test(self) -> None:
        """Score on test what was chosen on validation, with what it is compared with."""
        if self.plan.judged_on == "test":
            return
        every = self.artifacts | self.kept
        for name in chosen(self.report.data):
            try:
                with panics_explained():
                    score = self._score(name, every[name], on_test=True)
            except Exception as error:
                failure = self._explain(error, name)
                self.report.untested(name, failure)
                self.display.line(f"{name}: on test: {_told(failure)}")
                continue
            self.report.tested(name, score)
            first = "".join(f"{metric} {s['value']:.2f}" for metric, s in [*score["quality"].items()][:1])
            self.display.line(f"{name}: on test {first}")
        self.report.judge_test()

    def _earlier(self) -> None:
        """Report what an earlier run in this folder did of the steps that `--until` leaves out."""
        self.kept = self.place.keep(self.plan, self.shop, self.artifacts)
        if self.scorer.reference is None:
            self.scorer = replace(self.scorer, reference=self.kept.get(self.plan.recipe.baseline))
        for step in self.plan.rest:
            if artifact := self.kept.get(step.name):
                reason = _unscored(artifact)
                score = None if reason else self.scorer.kept(artifact, self.data[self.plan.judged_on])
                self.report.earlier(step, artifact, score, reason)
                self.display.line(f"{step.name}: kept from an earlier run in this folder")

    def _waits(self, what: str) -> Callable[[str], None]:
        return lambda holder: self.display.line(f"{what}: waits for {holder}, which is measuring")

    def _is_fresh(self, name: str) -> bool:
        return bool(self.options.rebuild & {"*", name})

    def _latency(self) -> None:
        settings = self.plan.recipe.score.latency
        every = self.artifacts | self.kept
        scored = {name: a for name, a in every.items() if name in self.report.statistics}
        if not settings or self.plan.recipe.baseline not in scored:
            return
        timed = {name: a for name, a in scored.items() if self._is_timed(name, settings)}
        self.display.begin("latency")
        scores = LatencyScores(self.store, self.plan.recipe, self.data["test"])
        try:
            with self.store.lock("latency", self._waits("latency")):  # two at once disturb each other
                scores.measure(
                    timed,
                    self.plan.recipe.baseline,
                    self.display.progress,
                    self._is_fresh("*"),
                    frozenset(self.kept),
                    self._timed,
                    max(_SHORTEST, sum(a.manifest.seconds for a in self.artifacts.values())),
                )
        except Exception as error:
            failure = self._explain(error, "latency")
            self.report.untimed(failure)
            self.display.line(_told(failure))

    def _is_timed(self, name: str, settings: LatencySettings) -> bool:
        gates = (gate.metric for gate in self.plan.gates_of(name))
        always = name == self.plan.recipe.baseline or any(metric in SPEEDS for metric in gates)
        return always or settings.times(name, self.report.is_deployable(name))

    def _timed(self, measured: Mapping[str, Mapping[str, Any]]) -> None:
        """Report the times that are known so far, so that nothing is lost when the run is stopped."""
        self.report.add_latency(measured)
        self._write_report()

    def _write_report(self, last: bool = False) -> None:
        """Write the report; one that cannot be written stops the run only when it is the last.

        Raises:
            RunError: the last report cannot be written.
        """
        try:
            write_report(self.folder, self.report.current())
        except OSError as error:
            failure = explain(error, "report", self.folder, self.display.log_path)
            if last:
                raise failure from error
            self.display.line(f"warning: {failure}")


def _unscored(artifact: Artifact) -> str | None:
    details = artifact.manifest.details
    return unscored_reason(artifact.format, details.get("target"), details.get("dtype"))
