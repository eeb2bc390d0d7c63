"""The report of a search: scores of the winners on test, importances, figures."""

import json
from dataclasses import replace
from threading import Event, Thread
from types import SimpleNamespace

import pytest

from smelt.core.errors import RunError
from smelt.pipeline.search import trials as trials_module
from smelt.pipeline.search.report import (
    _time_text,
    exit_code,
    finish_search,
    importances,
    search_html,
    summary_text,
)
from smelt.pipeline.search.space import Objective
from smelt.pipeline.search.study import Search
from smelt.pipeline.search.trials import TrialResult
from tests.support.search_recipes import formula, search, size_space


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    return size_space(tmp_path_factory.mktemp("space"))


@pytest.fixture(autouse=True)
def formula_for_runs(monkeypatch):
    monkeypatch.setattr(Search, "_measure", lambda self, trial: formula(trial.params))


def test_interruption_stops_scoring_of_front(space, tmp_path, monkeypatch):
    job, labels = search(space, tmp_path), []
    job.run()
    monkeypatch.setattr(Search, "front", lambda self: self.finished_trials()[:2])
    interrupted = SimpleNamespace(report={"status": "interrupted", "steps": []})
    monkeypatch.setattr(
        "smelt.pipeline.search.study.run_plan", lambda plan, options: labels.append(plan) or interrupted
    )
    report = finish_search(job, "trials")
    assert (len(labels), report["ended"]) == (1, "interrupted")
    assert [point["test"] for point in report["front"]] == [None, None]
    page = (tmp_path / "search.md").read_text()
    assert [trial["name"] for trial in report["trials"] if trial["name"] not in page] == []


def test_failed_test_score_does_not_stop_other_winners(space, tmp_path, monkeypatch):
    job = search(space, tmp_path)
    job.run()
    monkeypatch.setattr(Search, "front", lambda self: self.finished_trials()[:3])
    full = {"code": "disk-full", "message": "on test: The disk is full.", "severity": "error"}
    step = {"name": "onnx", "error": None, "latency": [], "format": "onnx", "deployable": True}
    score = {"value": 29.0, "ci95": None, "higher_is_better": True}
    test = {"quality": {"bleu": score}, "against_baseline": {}, "gates": []}
    results = iter(
        [
            RunError("No memory.", code="out-of-memory"),
            step | {"error": full, "test": None},
            step | {"test": test},
        ]
    )

    def run(plan, options):
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return SimpleNamespace(report={"status": "error", "steps": [result]})

    monkeypatch.setattr("smelt.pipeline.search.study.run_plan", run)
    report = finish_search(job, "trials")
    errors = [point["test_error"] and point["test_error"]["code"] for point in report["front"]]
    assert errors == ["out-of-memory", "disk-full", None]
    assert report["front"][2]["test"] == test
    text = "\n".join(summary_text(report, job.folder))
    assert all(f"error[{code}]" in text for code in errors[:2])
    assert json.loads((tmp_path / "search.json").read_text()) == json.loads(json.dumps(report))
    assert exit_code(report) == 0
    assert exit_code(report | {"front": report["front"][:2]}) == 1
    first = report["front"][2]  # was scored
    for kind, is_deployable, deployed in (
        ("onnx", True, "smelt package"),
        ("tensorrt", True, "cp -rL"),
        ("torch", False, ""),
    ):
        text = summary_text(
            report | {"front": [first | {"format": kind, "deployable": is_deployable}]}, job.folder
        )
        [ships] = [line for line in text if line.startswith("Package")] or [""]
        assert (deployed in ships, bool(ships)) == (True, is_deployable)
        assert any("cannot be deployed" in line for line in text) is not is_deployable


def test_winners_are_scored_by_one_worker_at_a_time(space, tmp_path, monkeypatch):
    job, other, waiting, order = search(space, tmp_path), search(space, tmp_path), Event(), []
    job.run()
    other._report = lambda line: waiting.set()
    second = Thread(target=finish_search, args=(other, "trials"))

    def score(self, trial):
        if self is job:
            second.start()
            assert waiting.wait(60)
        order.append(self is job)
        return {"steps": [{"name": "onnx", "error": None, "test": None, "latency": []}]}

    monkeypatch.setattr(Search, "score_on_test", score)
    finish_search(job, "trials")
    second.join(60)
    assert order == [True, False]


def test_settings_of_absent_stages_have_zero_importance(tmp_path, monkeypatch):
    """The best trials are without the stage: the values that its setting has in them mean nothing."""
    space = size_space(tmp_path, sampler="random", optional=True)

    def size(params):  # without the stage, a low value of its setting goes with a small size by chance
        return 10 * params["prune"] + params["prune.keep_ratio"] * (not params["prune"])

    monkeypatch.setattr(
        Search, "_measure", lambda self, trial: TrialResult("feasible", {"size": size(trial.params)}, {})
    )
    monkeypatch.setattr(trials_module.TrialQueue, "known_trial", lambda self, study, trial: None)
    job = search(space, tmp_path / "out", trials=40)
    job.run()
    assert importances(job)["size"]["prune.keep_ratio"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("objectives", [("size",), ("size", "bleu"), ("latency", "size", "bleu")])
def test_search_page_has_figures_without_external_links(space, tmp_path, monkeypatch, objectives):
    """A trial that failed has no values, and one without a stage has no value of its settings."""

    numbers = iter(range(4))

    def measure(self, trial):
        if (number := next(numbers)) == 1:
            raise RunError("The disk is full.", code="disk-full")
        values = {"size": 10e6 - 1e6 * number, "bleu": 20.0 + number % 2, "latency": 0.5}
        return TrialResult("infeasible" if number == 3 else "feasible", values, {"bleu": number - 2.5})

    monkeypatch.setattr(Search, "_measure", measure)
    goals = tuple(Objective(name, name == "bleu") for name in objectives)
    optional = replace(size_space(tmp_path, optional=True), objectives=goals)
    job = search(optional, tmp_path / "out", trials=4)
    job.run()
    monkeypatch.setattr(Search, "front", lambda self: [])
    report = finish_search(job, "trials")
    statuses = [trial["status"] for trial in report["trials"]]
    assert statuses == ["feasible", "failed", "feasible", "infeasible"]
    page = (job.folder / "search.html").read_text()
    expected = ["Trials and front"] * (len(objectives) > 1) + ["History", "Parameters of the trials"]
    figures = [part.partition('"')[0] for part in page.split('<svg class="')[1:]]
    assert figures == [f"figure{number}" for number in range(len(expected))]
    assert [title for title in expected if f'aria-label="{title}"' not in page] == []
    assert "quantize.scheme" in page.split("<svg")[-1]
    assert "://" not in page.replace("http://www.w3.org", "")
    assert "<svg" not in search_html(report | {"trials": report["trials"][:2]})  # one value


@pytest.mark.parametrize("step", [", step: 0.2", ""])
def test_search_ended_by_time_reports_untried_points(tmp_path, monkeypatch, step):
    space = size_space(tmp_path, f"{{low: 0.5, high: 0.9{step}}}")
    monkeypatch.setattr(Search, "front", lambda self: [])
    first = search(space, tmp_path / "out", trials=2)
    assert finish_search(first, first.run())["ended"] == "trials"
    job = search(space, tmp_path / "out", trials=12, time_limit_minutes=1e-9)
    report = finish_search(job, job.run())
    assert report["ended"] == "time"
    assert report["left"] == {"trials": 10, "points": 4 if step else None}
    for page in (" ".join(summary_text(report, tmp_path)), (tmp_path / "out" / "search.md").read_text()):
        assert _time_text(report) in page.replace("\\", "")  # Markdown escapes _
