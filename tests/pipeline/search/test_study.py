"""Trials, constraints, repeats, resuming and workers of a study. What trials measure is a formula here."""

import contextlib
import os
import random
import signal
import time
import warnings
from dataclasses import replace

import optuna
import pytest

from smelt.cli.commands import minutes_of
from smelt.core.errors import InputError, RunError
from smelt.core.messages import message_codes
from smelt.pipeline.recipe.recipe import GateSettings
from smelt.pipeline.search import trials as trials_module
from smelt.pipeline.search.report import importances
from smelt.pipeline.search.space import Objective, SearchSpace, read_space
from smelt.pipeline.search.storage import StudyStorage
from smelt.pipeline.search.study import Search, spread
from smelt.pipeline.search.trials import Trial, TrialResult
from tests.support.expected_errors import raises_code
from tests.support.search_recipes import formula, search, size_space, small, study_url, write


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    return size_space(tmp_path_factory.mktemp("space"))


@pytest.fixture(autouse=True)
def formula_for_runs(monkeypatch):
    monkeypatch.setattr(Search, "_measure", lambda self, trial: formula(trial.params))


def history(job):
    return [(trial.parameters, trial.result.values, trial.result.status) for trial in job.finished_trials()]


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_equal_seed_gives_equal_trials(space, tmp_path, sampler):
    jobs = [search(space, tmp_path / name, sampler=sampler) for name in ("one", "two")]
    assert [job.run() for job in jobs] == ["trials", "trials"]
    assert history(jobs[0]) == history(jobs[1])
    assert len(history(jobs[0])) == 12
    assert history(jobs[0])[0] != history(jobs[0])[1]


def test_best_point_meets_constraint(space, tmp_path):
    job = search(space, tmp_path, trials=40)
    job.run()
    [best] = job.front()
    feasible = [t for t in job.finished_trials() if formula(t.parameters).violations["bleu"] <= 0]
    assert best.result.values["size"] == min(trial.result.values["size"] for trial in feasible)
    # the optimum is int4 with 0.775: TPE finds it within a few percent, which 40 random points need not
    assert best.parameters["quantize.scheme"] == "int4"
    assert best.result.values["size"] < 1.05 * 50 * 0.775
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importance_shares = importances(job)["size"]
    assert sum(importance_shares.values()) == pytest.approx(1)


def test_nearest_trial_is_named_without_feasible_point(space, tmp_path, monkeypatch):
    low = lambda self, trial: TrialResult("infeasible", {}, {"bleu": 2 - trial.params["prune.keep_ratio"]})  # noqa: E731
    monkeypatch.setattr(Search, "_measure", low)
    job = search(space, tmp_path)
    job.run()
    assert job.front() == []
    highest = max(job.finished_trials(), key=lambda trial: trial.parameters["prune.keep_ratio"])
    assert job.nearest() == highest


def test_killed_searches_resume_with_same_trials(space, tmp_path, monkeypatch):
    expected_job = search(space, tmp_path / "undisturbed")
    expected_job.run()
    monkeypatch.setattr(Search, "_measure", lambda self, trial: time.sleep(0.02) or formula(trial.params))
    draw = random.Random(0)
    for _ in range(6):
        child = os.fork()
        if child == 0:
            try:
                search(space, tmp_path / "killed").run()
            finally:
                os._exit(0)
        time.sleep(draw.uniform(0.02, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    job = search(space, tmp_path / "killed")
    job.run()
    assert history(job) == history(expected_job)


def forked(work):
    """Fork a process that calls `work` and ends, with 0 if it returns "trials"."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() == "trials" else 2
        finally:
            os._exit(code)
    return child


@pytest.mark.parametrize("moment", ["while parameters are drawn", "before the trial is finished"])
def test_search_killed_between_writes_resumes_with_same_trials(space, tmp_path, monkeypatch, moment):
    expected_job = search(space, tmp_path / "undisturbed")
    expected_job.run()
    search(space, tmp_path / "killed", trials=5).run()
    with monkeypatch.context() as patch:
        if moment == "while parameters are drawn":
            sample, sampled = optuna.samplers.TPESampler.sample_independent, []

            def die(self, study, trial, name, distribution):
                sampled.append(name)
                return sample(self, study, trial, name, distribution) if len(sampled) < 2 else os._exit(9)

            patch.setattr(optuna.samplers.TPESampler, "sample_independent", die)
        else:
            patch.setattr("optuna.study.Study.tell", lambda *args, **more: os._exit(9))
        _, status = os.waitpid(forked(search(space, tmp_path / "killed").run), 0)
        assert os.waitstatus_to_exitcode(status) == 9
    job = search(space, tmp_path / "killed")
    job.run()
    assert history(job) == history(expected_job)


@pytest.fixture(params=["file", "postgresql"])
def storage(request, tmp_path):
    """The URL of a storage; None for the database in the search's folder."""
    with study_url(request.param, tmp_path) as url:
        yield url


def test_workers_share_study_without_repeating_trials_of_dead_worker(space, tmp_path, monkeypatch, storage):
    options = {"storage": storage, "trials": 12}
    stuck = lambda self, trial: (tmp_path / "stuck").touch() or time.sleep(60)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(Search, "_measure", stuck)
        dying = forked(search(space, tmp_path / "out", **options).run)
    while not (tmp_path / "stuck").exists():
        time.sleep(0.01)
    os.kill(dying, signal.SIGKILL)
    os.waitpid(dying, 0)
    monkeypatch.setattr(Search, "_measure", lambda self, trial: time.sleep(0.05) or formula(trial.params))
    children = [forked(search(space, tmp_path / "out", **options).run) for _ in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    job = search(space, tmp_path / "out", **options)
    trial_points = [tuple(sorted(trial.parameters.items())) for trial in job.finished_trials()]
    assert len(trial_points) == len(set(trial_points)) == 12
    study = job.open_study()
    lost_point = tuple(sorted(study.trials[0].params.items()))
    assert (study.trials[0].state.name, lost_point in trial_points) == ("FAIL", True)
    assert message_codes(job.warnings()) == ["worker-died"]
    assert f"process {dying}," in job.warnings()[0].message


def test_interrupted_trial_is_repeated_first(space, tmp_path, monkeypatch):
    measured_params = []

    def interrupt(self, trial):
        measured_params.append(trial.params)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Search, "_measure", interrupt)
        assert search(space, tmp_path).run() == "interrupted"
    job = search(space, tmp_path, trials=2)
    job.run()
    assert job.finished_trials()[0].parameters == measured_params[0]


def test_grid_has_every_point_once(tmp_path):
    job = search(stepped(tmp_path), tmp_path / "out", trials=100)
    assert job.run() == "exhausted"
    points = {
        (round(t.parameters["prune.keep_ratio"], 6), t.parameters["quantize.scheme"])
        for t in job.finished_trials()
    }
    assert points == {(keep, scheme) for keep in (0.5, 0.7, 0.9) for scheme in ("int8-dynamic", "int4")}
    with raises_code("grid-without-step"):
        search(size_space(tmp_path, sampler="grid"), tmp_path / "other").run()


def test_settings_of_unused_stage_are_ignored(tmp_path):
    space = size_space(tmp_path, "{low: 0.5, high: 0.9, step: 0.4}", "random", optional=True)
    job = search(space, tmp_path / "out", trials=100)
    assert job.run() == "exhausted"
    assert len(job.finished_trials()) == 2 * (2 + 1)


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_repeating_sampler_still_visits_every_point(space, tmp_path, monkeypatch, sampler):
    """It always draws the same point; the others of the space are found all the same, and its end."""
    steps = size_space(tmp_path, "{low: 0.5, high: 0.9, step: 0.1}")
    same = {"prune.keep_ratio": 0.7, "quantize.scheme": "int4"}

    class Same(optuna.samplers.BaseSampler):
        infer_relative_search_space = lambda self, study, trial: {}  # noqa: E731
        sample_relative = lambda self, study, trial, space: {}  # noqa: E731
        sample_independent = lambda self, study, trial, name, distribution: same[name]  # noqa: E731

    make = trials_module.make_sampler
    monkeypatch.setattr(trials_module, "_MAX_SAMPLER_REPEATS", 2)
    monkeypatch.setattr(
        trials_module, "make_sampler", lambda name, seed: make(name, seed) if name == "random" else Same()
    )
    job, lines = search(steps, tmp_path / "steps", trials=100, sampler=sampler), []
    assert job.run(lines.append) == "exhausted"
    shown = [line.rpartition(":")[2].split(",") for line in lines if line.startswith("repeats")]
    numbers = {trial.number for trial in job.finished_trials()} | {int(n) for each in shown for n in each}
    points = [
        (f"{trial.parameters['prune.keep_ratio']:.2g}", trial.parameters["quantize.scheme"])
        for trial in job.finished_trials()
    ]
    assert len(points) == len(set(points)) == 5 * 2
    assert numbers == set(range(max(numbers) + 1))
    # an endless space goes on
    job = search(space, tmp_path / "endless", trials=5, sampler=sampler)
    assert job.run() == "trials"


def test_trial_text_shows_megabytes_and_no_settings_of_absent_stages(tmp_path):
    job = search(size_space(tmp_path, optional=True), tmp_path / "out")
    point = {"prune": False, "prune.keep_ratio": 0.7, "quantize.scheme": "int4"}
    result = TrialResult("feasible", {"latency": 0.25, "size": 3_518_000.0, "bleu": 98.91})
    text = job.trial_text(Trial(3, point, result))
    assert "keep_ratio" not in text
    assert "latency 0.25, size 3.518 MB" in text
    assert "prune.keep_ratio=0.7" in job.trial_text(Trial(3, point | {"prune": True}, result))


def test_limited_study_is_not_resumed_without_limit(space, tmp_path):
    search(space, tmp_path, trials=1, limit=100).run()
    search(space, tmp_path, trials=2, limit=100).run()
    with raises_code("other-study", InputError):
        search(space, tmp_path, trials=2).run()


def test_study_of_other_recipe_is_rejected(space, tmp_path):
    search(space, tmp_path / "out", trials=1).run()
    other = size_space(tmp_path, "[0.5, 0.8]")
    renamed = replace(space, path=tmp_path / "renamed.yaml")
    for other_space in (other, renamed):
        for attempt in (
            search(other_space, tmp_path / "out").run,
            search(other_space, tmp_path / "out").check,
        ):
            with raises_code("other-study", InputError):
                attempt()


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_trial_finished_by_other_worker_is_not_requeued(space, tmp_path, monkeypatch):
    job = search(space, tmp_path)
    job._prepare()
    study = job.open_study()
    trial = study.ask(job.queue.distributions)
    dead_workers = StudyStorage.dead_workers

    def finish_then_look(self, trials):
        dead = dead_workers(self, trials)
        job.queue.tell(study, trial, formula(trial.params))
        return dead

    monkeypatch.setattr(StudyStorage, "dead_workers", finish_then_look)
    job.queue.reclaim(study)
    assert [stored_trial.state.name for stored_trial in study.trials] == ["COMPLETE"]


def test_study_with_other_limit_is_rejected(space, tmp_path):
    search(space, tmp_path, trials=1, limit=100).run()
    with raises_code("other-study", InputError):
        search(space, tmp_path).run()


def stepped(folder):
    """A grid of six points."""
    return size_space(folder, "{low: 0.5, high: 0.9, step: 0.2}", "grid")


@pytest.mark.parametrize(("method", "calls"), [("set_user_attr", 0), *(("enqueue_trial", n) for n in (2, 6))])
def test_worker_killed_while_writing_study_does_not_break_it(tmp_path, monkeypatch, method, calls):
    """It dies before it sets the identity, between two points of the grid, or before an interrupted one."""

    class Killed(BaseException):
        pass

    original, done = getattr(optuna.Study, method), []

    def die(self, *args, **kwargs):
        done.append(args)
        if len(done) > calls:
            raise Killed
        return original(self, *args, **kwargs)

    def interrupt(self, trial):
        if trial.number:
            raise KeyboardInterrupt
        return formula(trial.params)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, method, die)
        patch.setattr(Search, "_measure", interrupt)
        with contextlib.suppress(Killed):
            while True:
                search(stepped(tmp_path), tmp_path / "out", trials=100).run()
    job = search(stepped(tmp_path), tmp_path / "out", trials=100)
    assert job.run() == "exhausted"
    assert len(job.finished_trials()) == 6


def test_grid_sampler_can_resume_random_study(tmp_path):
    search(stepped(tmp_path), tmp_path / "out", trials=2, sampler="random").run()
    job = search(stepped(tmp_path), tmp_path / "out", trials=100)
    job.run()
    assert len(job.finished_trials()) == 6


def test_grid_continues_after_many_points_without_stage(tmp_path, monkeypatch):
    """The settings of a stage that is not used give many points of the same recipe in a row."""
    cut = "  - drop-layers: {decoder_layers: {search: [1, 2]}}\n  - quantize:"
    text = (
        small(**{"\n    optional: search": "\n    optional: search", "  - quantize:": cut})
        .replace("[0.5, 0.9]", "{choices: [0.5, 0.6, 0.7, 0.8]}")
        .replace("{search: {choices: [int8-dynamic, int4]}}", "int4")
        .replace("[latency, size]\n  maximize: quality", "size\n  sampler: grid")
    )
    lines = text.splitlines(keepends=True)  # the range that both values are wanted of comes first
    index = lines.index("  - drop-layers: {decoder_layers: {search: [1, 2]}}\n")
    lines.insert(lines.index("stages:\n") + 1, lines.pop(index))
    monkeypatch.setattr("smelt.pipeline.search.trials._MAX_SAMPLER_REPEATS", 3)
    monkeypatch.setattr(Search, "_measure", lambda self, trial: TrialResult("feasible", {"size": 1.0}, {}))
    job = search(read_space(write(tmp_path, "".join(lines))), tmp_path / "out", trials=100)
    assert job.run() == "exhausted"
    assert len(job.finished_trials()) == 2 * (4 + 1)


def test_unreachable_storage_is_reported_without_password(space, tmp_path):
    for url in ("sqlite:////nowhere/at/all/study.db", "no-such-database://user:secret@host/name"):
        for attempt in (Search.run, Search.check):
            with pytest.raises(InputError) as raised:
                attempt(search(space, tmp_path, storage=url))
            assert raised.value.code == "storage-unreachable"
            assert "secret" not in str(raised.value)


def test_search_check_writes_nothing(space, tmp_path):
    for url in (None, f"sqlite:///{tmp_path}/study.db"):
        search(space, tmp_path / "out", storage=url).check()
    assert list(tmp_path.iterdir()) == []


def test_failed_trials_are_recorded_and_repeated_failures_end_search(space, tmp_path, monkeypatch):
    def fail(self, trial):
        raise RunError("The disk is full.", code="disk-full")

    monkeypatch.setattr(Search, "_measure", fail)
    job = search(space, tmp_path)
    with raises_code("disk-full", RunError):
        job.run()
    assert [trial.result.error["code"] for trial in job.finished_trials()] == ["disk-full"] * 5


def report_of(rows, drop, size=10.0, spread=0.5):
    """The report of a run whose last step lost `drop` BLEU."""
    score = {"value": 30.0 - drop, "ci95": [29.0 - drop, 31.0 - drop], "higher_is_better": True}
    test = {"difference": -drop, "ci95": [-drop - spread, -drop + spread], "p_value": 0.01}
    gate = {"metric": "bleu", "kind": "max_degradation", "limit": 1.0, "value": drop, "bound": None}
    step = {
        "name": "onnx", "status": "done", "seconds": 1.0, "size_bytes": size, "peak_memory_bytes": None,
        "quality": {"bleu": score} if rows else {}, "against_baseline": {"bleu": test} if rows else {},
        "latency": [], "gates": [gate] if rows else [], "error": None,
    }  # fmt: skip
    return {"status": "passed", "steps": [step]}


@pytest.mark.parametrize(("drop", "status", "scored"), [
    (5.0, "stopped", [None, 39]),  # clear on the first part
    (1.3, "infeasible", [None, 39, 156, 625]),  # only the value is beyond the limit, not the interval
    (0.2, "feasible", [None, 39, 156, 625]),
])  # fmt: skip
def test_quality_is_scored_on_growing_samples(space, tmp_path, monkeypatch, drop, status, scored):
    monkeypatch.undo()
    limits = []

    def run(self, plan, options):
        limits.append((options.score_limit or 625) if options.scored else None)
        assert options.timed is False or not options.scored
        return report_of(limits[-1], drop)

    monkeypatch.setattr(Search, "_run", run)
    monkeypatch.setattr(Search, "_rungs", lambda self: [39, 156])
    job = search(space, tmp_path, trials=1)
    job.run()
    assert limits == scored
    assert job.finished_trials()[0].result.status == status


@pytest.mark.parametrize(("gates", "status"), [
    ([], "failed"),  # what is constrained was not measured
    ([{"metric": "speedup", "value": 1.5}], "feasible"),  # by the clock, which was disturbed, it is not
])  # fmt: skip
def test_unmeasured_or_disturbed_constraints_are_not_satisfied(tmp_path, monkeypatch, gates, status):
    monkeypatch.undo()
    text = small().replace("[latency, size]\n  maximize: quality", "latency")
    text = text.replace("{bleu: {max_degradation: 1.0}}", "{speedup: {min: 2}}")
    report = report_of(39, 0.2)
    [step] = report["steps"]
    step["gates"] = [gate | {"kind": "min", "limit": 2, "bound": None} for gate in gates]
    row = {"speedup": 1.5, "cpu_speedup": 2.5, "stable": False}
    step["latency"] = [row | {"batch_size": 8, "cpu_speedup": 1.0}, row | {"batch_size": 1}]
    monkeypatch.setattr(Search, "_run", lambda self, plan, options: report)
    job = search(read_space(write(tmp_path, text)), tmp_path / "out", trials=1)
    job.run()
    [trial] = job.finished_trials()
    assert trial.result.status == status
    if status == "feasible":
        assert (trial.result.values, trial.result.violations) == ({"latency": 0.4}, {"speedup": -0.5})


def test_rungs_are_quarters_of_validation_samples(space, tmp_path):
    rows = len(space.plan.splits["validation"])
    assert search(space, tmp_path)._rungs() == [rows // 4]  # a sixteenth would be too few
    assert search(space, tmp_path, limit=200)._rungs() == [50]
    assert search(space, tmp_path, limit=100)._rungs() == []


def test_too_large_trial_is_not_scored(tmp_path, monkeypatch):
    monkeypatch.undo()
    space, scored = size_space(tmp_path, **{"{bleu: {max_degradation: 1.0}}": "{size_bytes: {max: 5}}"}), []
    monkeypatch.setattr(
        Search, "_run", lambda self, plan, options: scored.append(options.scored) or report_of(0, 0)
    )
    job = search(space, tmp_path / "out", trials=1)
    job.run()
    assert scored == [False]
    assert job.finished_trials()[0].result.violations == {"size_bytes": 5.0}


@pytest.mark.parametrize(("maximize", "expected"), [((False, False), [0, 1, 4, 3]), ((True, False), [3])])
def test_front_has_feasible_non_dominated_trials(space, tmp_path, monkeypatch, maximize, expected):
    values = [(1, 5), (2, 3), (3, 4), (4, 1), (2, 3), (0, 0), (9, 0)]

    def measure(self, trial):
        objective_values = dict(zip(("size", "memory"), map(float, values[trial.number]), strict=True))
        return TrialResult(
            "infeasible" if trial.number > 4 else "feasible", objective_values, {"bleu": trial.number - 4.0}
        )

    monkeypatch.setattr(Search, "_measure", measure)
    goals = tuple(Objective(name, up) for name, up in zip(("size", "memory"), maximize, strict=True))
    job = search(replace(space, objectives=goals), tmp_path, trials=len(values))
    job.run()
    assert [trial.number for trial in job.front()] == expected


def test_spread_selects_evenly_spaced_trials():
    assert spread(range(5), 3) == [0, 2, 4]


def test_durations_are_read_with_unit():
    assert [minutes_of(text, "--time-limit") for text in ("90s", "30m", "2h", "1.5 h")] == [1.5, 30, 120, 90]
    for invalid_text in ("30", "0m", "later"):
        with raises_code("wrong-value"):
            minutes_of(invalid_text, "--time-limit")


def test_point_running_in_other_worker_is_not_repeated(tmp_path, monkeypatch):
    space = size_space(tmp_path, "{choices: [0.5, 0.9]}", "random")
    job = search(space, tmp_path / "out", trials=100)
    measured_params = []

    def measure(self, trial):
        measured_params.append(tuple(trial.params.values()))
        if len(measured_params) == 1:  # a second worker, while this trial is running
            assert search(self.space, tmp_path / "out", trials=100).run() == "exhausted"
        return formula(trial.params)

    monkeypatch.setattr(Search, "_measure", measure)
    assert job.run() == "exhausted"
    assert len(measured_params) == len(set(measured_params)) == len(job.finished_trials()) == 4


def test_nearest_trial_was_scored_on_all_samples(space, tmp_path, monkeypatch):
    complete = TrialResult("infeasible", {}, {"bleu": 0.2})
    stopped = TrialResult("stopped", {}, {"bleu": 0.05}, samples=32)
    unscored = TrialResult("infeasible", {}, {"size_bytes": 0.1})
    trials = [Trial(number, {}, result) for number, result in enumerate((unscored, stopped, complete))]
    job = search(space, tmp_path)
    gates = space.constraints | {"size_bytes": GateSettings(max=100.0)}
    monkeypatch.setattr(SearchSpace, "constraints", gates)
    measured = replace(complete, violations={"bleu": 0.2, "size_bytes": -1.0})
    monkeypatch.setattr(Search, "finished_trials", lambda self: [*trials[:2], Trial(2, {}, measured)])
    assert job.nearest().number == 2


@pytest.mark.quick
def test_in_memory_database_is_rejected_and_passwords_are_hidden(tmp_path):
    for url in ("sqlite://", "sqlite:///:memory:"):
        with raises_code("storage-unreachable", InputError):
            StudyStorage(url, tmp_path, "study", print).check("identity", print)
    for url in ("no-such://u:p@ss@host/db", "no-such://host/db?user=u&password=ss"):
        with pytest.raises(InputError) as raised:
            StudyStorage(url, tmp_path, "study", print).check("identity", print)
        assert "ss@" not in str(raised.value)
        assert "=ss" not in str(raised.value)
