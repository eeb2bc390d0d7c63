"""Which times are kept in the store, and what is left of them when a run is stopped."""

import json

import pytest

from smelt.evaluate.latency import measurement
from smelt.evaluate.report.schema import validate_report
from tests.support import harness
from tests.support.models import tiny
from tests.support.standins import fake_workers

RECIPE = """
model: m
task: text-classification
data: {train: data.jsonl, test: data.jsonl}
stages:
  - prune: {targets: [ffn], keep_ratio: 0.5, importance: magnitude}
    name: one
  - prune: {targets: [ffn], keep_ratio: 0.25, importance: magnitude}
    from: model
    name: two
score: {quality: [accuracy], latency: {batch_sizes: [1, 2], rounds: 3, texts: 2}}
"""


@pytest.fixture
def home(tmp_path):
    tiny.write_bert(tmp_path / "m")
    tiny.write_labeled(tmp_path / "data.jsonl", 8)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def _run(home, *arguments):
    result = harness.smelt("run", home / "recipe.yaml", "--out", home / "r", "--quiet", *arguments)
    report = json.loads((home / "r" / "report.json").read_text())
    validate_report(report)
    return result, report, {step["name"]: step for step in report["steps"]}


def _loads(fake):
    folders = [folder for op, folder in fake.asked if op == "load"]
    fake.asked.clear()
    return folders


def test_interrupted_latency_is_reported_cached_and_resumed(home, monkeypatch):
    fake = fake_workers.install(monkeypatch)
    ask = fake.ask

    def stopped(self, op, **request):
        if op == "round" and len([1 for asked, _ in fake.asked if asked == "load"]) == 3:
            raise KeyboardInterrupt
        return ask(self, op, **request)

    monkeypatch.setattr(fake, "ask", stopped)
    result, report, steps = _run(home)
    assert (result.exit_code, report["status"]) == (130, "interrupted")
    assert [row["batch_size"] for row in steps["one"]["latency"]] == [1, 2]
    assert [row["batch_size"] for row in steps["model"]["latency"]] == [1, 2]
    assert steps["two"]["latency"] == []
    keys = {name: step["key"] for name, step in steps.items()}
    assert _loads(fake) == [keys["model"], keys["one"], keys["two"]]

    monkeypatch.setattr(fake, "ask", ask)
    fake.ms = {keys["model"]: 9000.0}  # now so slow that it would leave time for fewer texts
    result, report, second_steps = _run(home)
    assert (result.exit_code, report["status"]) == (0, "passed")
    assert _loads(fake) == [keys["model"], keys["two"]]  # the baseline next to what is missing
    assert second_steps["one"]["latency"] == steps["one"]["latency"]
    assert second_steps["model"]["latency"] == steps["model"]["latency"]
    assert second_steps["two"]["latency"][0]["texts"] == steps["one"]["latency"][0]["texts"]
    _run(home)
    assert _loads(fake) == []


def test_disturbed_latency_is_measured_again_by_next_run(home, monkeypatch):
    fake = fake_workers.install(monkeypatch)
    noisy_folders = []
    fake.used = staticmethod(lambda folder, number: 0.5 if folder in noisy_folders else 0.99)
    _, _, steps = _run(home, "--set", "score.latency=false")
    noisy_folders.append(steps["two"]["key"])
    result, report, steps = _run(home)
    assert result.exit_code == 0
    assert [steps[n]["latency"][0]["stable"] for n in ("model", "one", "two")] == [True, True, False]
    assert "two" not in report["pareto_front"]
    assert steps["two"]["latency"][0]["cause"] == "busy"
    assert steps["two"]["latency"][0]["reason"] in (home / "r" / "report.md").read_text()
    _loads(fake)
    noisy_folders.clear()
    _, _, steps = _run(home)
    assert _loads(fake) == [steps["model"]["key"], steps["two"]["key"]]
    assert steps["two"]["latency"][0]["stable"]
    _run(home)
    assert _loads(fake) == []


def test_latency_cache_depends_on_version_and_settings(home, monkeypatch):
    import smelt.evaluate.latency as latency

    fake = fake_workers.install(monkeypatch)
    _run(home)
    fake.asked.clear()
    monkeypatch.setattr(latency, "LATENCY_VERSION", measurement.LATENCY_VERSION + 1)
    _run(home)
    assert len(_loads(fake)) == 3
    _run(home, "--set", "score.latency.threads=2")
    assert len(_loads(fake)) == 3
    assert measurement.LATENCY_VERSION == 5  # whoever changes what is timed, or what a row holds, raises it
    _run(home, "--set", "score.latency.time_limit_minutes=9")
    assert _loads(fake) == []  # how long all may take is no property of a time


def test_speed_gate_is_not_judged_on_disturbed_latency(home, monkeypatch):
    fake = fake_workers.install(monkeypatch)
    fake.used = staticmethod(lambda folder, number: 0.5)
    result, report, steps = _run(home, "--set", "gates={speedup: {min: 0.5, at: one}}")
    (gate,) = steps["one"]["gates"]
    assert (gate["passed"], gate["value"] > 0.5) == (None, True)
    assert steps["one"]["latency"][0]["cause"] == "busy"
    assert (result.exit_code, report["status"]) == (3, "gate-failed")
    fake.used = staticmethod(lambda folder, number: 0.99)
    result, _, steps = _run(home, "--set", "gates={speedup: {min: 0.9, at: one}}")
    assert (steps["one"]["gates"][0]["passed"], result.exit_code) == (True, 0)


@pytest.mark.parametrize(("steps", "gates", "timed"), [
    ("deployable", "", {"model", "one", "two"}),  # codes in torch are there to be exported
    ("all", "", {"model", "one", "two", "coded"}), ("two", "", {"model", "two"}),  # the baseline always
    ("[two]", "gates={cpu_speedup: {min: 0.1, at: coded}}", {"model", "two", "coded"}),
])  # fmt: skip
def test_deployable_steps_are_timed_by_default(home, monkeypatch, steps, gates, timed):
    fake_workers.install(monkeypatch)
    recipe = home / "recipe.yaml"
    quantize_step = "  - quantize: {scheme: int8-dynamic}\n    name: coded\nscore:"
    recipe.write_text(RECIPE.replace("score:", quantize_step))
    options = [
        option for text in (f"score.latency.steps={steps}", gates) if text for option in ("--set", text)
    ]
    _, _, steps_by_name = _run(home, *options)
    assert {name for name, step in steps_by_name.items() if step["latency"]} == timed
    if gates:
        (gate,) = steps_by_name["coded"]["gates"]
        assert gate["passed"]


def test_latency_budget_defaults_to_stage_time(home, monkeypatch):
    budgets = []
    real = measurement.measure_latency

    def measure(*args, **options):
        budgets.append(options["seconds"])
        return real(*args, **options)

    monkeypatch.setattr("smelt.evaluate.latency.measure_latency", measure)
    fake_workers.install(monkeypatch)
    _run(home)
    assert budgets == [60.0]  # the stages took less
    _run(home, "--rebuild", "*", "--set", "score.latency.time_limit_minutes=0.5")
    assert budgets[1:] == [30.0]
    monkeypatch.setattr("smelt.pipeline.execute.run._MIN_LATENCY_SECONDS", 0.0)
    _, report, _ = _run(home, "--set", "score.latency.rounds=4")
    assert budgets[2] == pytest.approx(sum(step["seconds"] for step in report["steps"]))
    assert budgets[2] > 0


def test_latency_cut_by_budget_is_reported_but_not_cached(home, monkeypatch):
    fake = fake_workers.install(monkeypatch)
    monkeypatch.setattr("smelt.pipeline.execute.run._MIN_LATENCY_SECONDS", 1e-9)
    _, _, steps = _run(
        home, "--set", "score.latency.rounds=9", "--set", "score.latency.time_limit_minutes=0.00001"
    )
    assert len(steps["two"]["latency"][0]["rounds"]) == 3
    assert steps["two"]["latency"][0]["stable"]
    fake.asked.clear()
    _, _, steps = _run(
        home, "--set", "score.latency.rounds=9", "--set", "score.latency.time_limit_minutes=10"
    )
    assert len(_loads(fake)) == 3
    assert len(steps["two"]["latency"][0]["rounds"]) == 9
    _run(home, "--set", "score.latency.rounds=9", "--set", "score.latency.time_limit_minutes=0.00001")
    assert _loads(fake) == []  # what was taken in full is for all
