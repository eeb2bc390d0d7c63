"""The time limit of a search ends a running trial between its steps; the first trial is always measured."""

import json

from smelt.pipeline.search.study import Search
from tests.support.search_recipes import search, size_space

MINUTE = 60.0


def test_time_limit_ends_every_trial_but_the_first_before_its_next_step(tmp_path, monkeypatch):
    clock = [0.0]
    run = Search._run

    def run_after_limit(self, plan, options):
        clock[0] += MINUTE
        return run(self, plan, options)

    monkeypatch.setattr(Search, "_run", run_after_limit)
    space = size_space(tmp_path)
    job = search(space, tmp_path / "out", trials=3, time_limit_minutes=1, limit=16)
    job.clock = lambda: clock[0]

    assert job.run() == "time"
    [first] = job.finished_trials()
    assert first.result.status in ("feasible", "infeasible")
    assert job.run() == "time"
    assert job.finished_trials() == [first]
    [ended] = [path for path in (tmp_path / "out" / "trials").glob("trial-*") if path.name != first.name]
    report = json.loads((ended / "report.json").read_text())
    assert report["status"] == "interrupted"
    assert [step["name"] for step in report["steps"] if step["status"] in ("done", "cached")] == ["model"]
