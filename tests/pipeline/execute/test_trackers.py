"""Experiment trackers: what MLflow's file store and TensorBoard's event files hold equals the report."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from smelt.core import system
from smelt.core.files import load_json
from smelt.pipeline.execute import trackers
from smelt.pipeline.execute.trackers import TRACKERS, TrackedRun
from smelt.pipeline.recipe.recipe import TRACKER_PACKAGES
from tests.support import harness
from tests.support.expected_errors import command_error
from tests.support.models import tiny

RECIPE = """
model: m
task: translation
trackers: [{trackers}]
data: {{train: rows.jsonl, validation: rows.jsonl, test: rows.jsonl}}
stages:
  - distill:
      teacher: model
      phases: [{{losses: {{hidden_states: 1}}, max_steps: 2}}, {{losses: {{logits: 1}}, max_steps: 3}}]
      batch_size: 2
      precision: fp32
    name: taught
  - prune: {{targets: [ffn], keep_ratio: 0.5, importance: magnitude}}
score: {{quality: [chrf], generation: {{max_new_tokens: 4}}, latency: false}}
"""


def write_recipe(folder, names):
    tiny.write_marian(folder / "m")
    tiny.write_pairs(folder / "rows.jsonl")
    (folder / "toy.yaml").write_text(RECIPE.format(trackers=", ".join(names)))
    return folder / "toy.yaml"


@pytest.mark.quick
@pytest.mark.parametrize("name", TRACKERS)
def test_missing_tracker_package_is_plan_error(tmp_path, monkeypatch, name):
    monkeypatch.setattr(system, "installed_version", lambda package: None)
    error = command_error(harness.smelt("plan", write_recipe(tmp_path, [name]), code=2))
    packages, oldest = TRACKER_PACKAGES[name]
    assert (error.code, error.line) == ("not-installed", 4)
    assert f"pip install '{packages[0]}>={oldest}'" in str(error)


def mlflow_runs(store):
    """Return the runs of the file store, oldest first: metric -> [(update, value)], parameters, files."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=store.as_uri())
    [experiment] = [e for e in client.search_experiments() if e.name == "toy"]
    runs = []
    for run in sorted(client.search_runs([experiment.experiment_id]), key=lambda run: run.info.start_time):
        history = {
            key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
        }
        files = {f.path for f in client.list_artifacts(run.info.run_id)}
        report = json.loads(
            (store / experiment.experiment_id / run.info.run_id / "artifacts" / "report.json").read_text()
        )
        runs.append(SimpleNamespace(run=run, history=history, files=files, report=report))
    return runs


def expected_history(report):
    """Return metric -> [(update, value)] of a report, from its steps and the details of the training."""
    history = {}
    for step in report["steps"]:
        history[f"{step['name']}/chrf"] = [(0, step["quality"]["chrf"]["value"])]
        history[f"{step['name']}/size_bytes"] = [(0, step["size_bytes"])]
    first, second = report["steps"][1]["details"]["phases"]
    for name in ("train_loss", "learning_rate"):
        points = [*zip(first["curve"]["step"], first["curve"][name], strict=True)]
        points += [(2 + s, v) for s, v in zip(second["curve"]["step"], second["curve"][name], strict=True)]
        history[f"taught/{name}"] = points
    points = [(v["step"], v["loss"]) for v in first["validations"]]
    history["taught/validation_loss"] = points + [(2 + v["step"], v["loss"]) for v in second["validations"]]
    return history


def test_mlflow_and_tensorboard_equal_report_also_for_cached_run(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    store = tmp_path / "mlruns"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    recipe, out = write_recipe(tmp_path, ["mlflow", "tensorboard"]), tmp_path / "run"
    for _ in range(2):
        harness.smelt("run", recipe, "--out", out, code=0)
    report = load_json(out / "report.json")
    assert [step["status"] for step in report["steps"]] == ["cached"] * 3
    assert [p["curve"]["step"] for p in report["steps"][1]["details"]["phases"]] == [[1, 2], [1, 2, 3]]
    expected = expected_history(report)
    for mlflow_run in mlflow_runs(store):
        assert {name: mlflow_run.history[name] for name in expected} == {
            name: [(step, pytest.approx(value)) for step, value in points]
            for name, points in expected.items()
        }
        assert mlflow_run.run.info.status == "FINISHED"
        assert mlflow_run.run.data.params["artifacts/prune"] == str(out / "artifacts" / "prune")
        assert mlflow_run.files == set(trackers.REPORT_FILES)
        assert [s["quality"] for s in mlflow_run.report["steps"]] == [s["quality"] for s in report["steps"]]
    events = EventAccumulator(str(out / trackers.TENSORBOARD_FOLDER)).Reload()
    assert {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in expected} == {
        tag: [(step, pytest.approx(value, rel=1e-6)) for step, value in points]
        for tag, points in expected.items()
    }
    [text] = events.Tensors("report/text_summary")
    assert text.tensor_proto.string_val[0].decode() == (out / "report.md").read_text()


class Recorder(ModuleType):
    """A module with the documented functions of one service, which records their calls."""

    def __init__(self, name):
        super().__init__(name)
        self.calls, self.config, self.summary = [], {}, {}

    def keep(self, called, /, **values):
        self.calls.append((called, values))


def fake_wandb():
    module = Recorder("wandb")
    run = SimpleNamespace(
        summary=module.summary,
        define_metric=lambda name, step_metric=None: module.keep("define", name=name, axis=step_metric),
        log=lambda data, step=None: module.keep("log", data=data, step=step),
        save=lambda glob_str, base_path=None, policy="live": module.keep("save", path=glob_str),
        finish=lambda exit_code=None: module.keep("finish", exit_code=exit_code),
    )
    module.init = lambda project=None, name=None, dir=None, config=None: (
        module.keep("init", project=project, name=name, config=config) or run
    )
    return module


def fake_swanlab():
    module = Recorder("swanlab")
    module.init = lambda project=None, experiment_name=None, config=None: module.keep(
        "init", project=project, name=experiment_name, config=config
    )
    module.log = lambda data, step=None: module.keep("log", data=data, step=step)
    module.Text = lambda data, caption=None: (data, caption)
    module.finish = lambda: module.keep("finish")
    return module


def fake_trackio():
    module = Recorder("trackio")
    module.init = lambda project, name=None, config=None, embed=True: module.keep(
        "init", project=project, name=name, config=config
    )
    module.log = lambda metrics, step=None: module.keep("log", data=metrics, step=step)
    module.Markdown = lambda text: (text, None)
    module.finish = lambda: module.keep("finish")
    return module


@pytest.mark.quick
@pytest.mark.parametrize("fake", [fake_wandb, fake_swanlab, fake_trackio])
def test_tracker_services_get_documented_arguments(tmp_path, monkeypatch, fake):
    module = fake()
    name = module.__name__
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv(f"{name.upper()}_PROJECT", raising=False)
    (tmp_path / "report.md").write_text("the report")
    tracker = TRACKERS[name](TrackedRun("toy", "toy-1", tmp_path, {"seed": "0"}))
    tracker.log("taught", {"train_loss": 2.0}, 7)
    tracker.summarize("prune", {"chrf": 30.0})
    tracker.finish([tmp_path / "report.md"], "passed")
    init, *calls, last = module.calls
    assert init == ("init", {"project": "toy", "name": "toy-1", "config": {"seed": "0"}})
    log_calls = [values for called, values in calls if called == "log"]
    if name == "wandb":
        assert calls[0] == ("define", {"name": "taught/*", "axis": "taught/update"})
        assert [v["data"] for v in log_calls] == [{"taught/train_loss": 2.0, "taught/update": 7}]
        assert module.summary == {"prune/chrf": 30.0, "status": "passed"}
        assert ("save", {"path": str(tmp_path / "report.md")}) in calls
        assert last == ("finish", {"exit_code": 0})
        return
    assert log_calls[:2] == [
        {"data": {"taught/train_loss": 2.0}, "step": 7},
        {"data": {"prune/chrf": 30.0}, "step": 0},
    ]
    assert "the report" in log_calls[2]["data"]["report"][0]
    assert last == ("finish", {})


def test_failing_trackers_warn_without_stopping_run(tmp_path, monkeypatch):
    calls = []

    def stand_in(tracker, fails_in):
        def method(name):
            def record(self, *args):
                calls.append((tracker, name))
                if name == fails_in:
                    raise ConnectionError("no route to host")

            return record

        return type(tracker, (), {name: method(name) for name in ("__init__", "log", "summarize", "finish")})

    fails = {"mlflow": "__init__", "wandb": "log", "swanlab": "summarize", "tensorboard": "finish"}
    for name in TRACKERS:
        monkeypatch.setitem(TRACKERS, name, stand_in(name, fails.get(name)))
    monkeypatch.setattr(system, "installed_version", lambda package: "99.0")
    recipe, out = write_recipe(tmp_path, TRACKERS), tmp_path / "run"
    harness.smelt("run", recipe, "--out", out, "--until", "taught", code=0)
    report = load_json(out / "report.json")
    assert report["status"] == "passed"
    failed = [message["message"] for message in report["warnings"] if message["code"] == "tracker-failed"]
    # in the order of their failures: at the start, after the step `model`, in training, at the end
    order = ["mlflow", "swanlab", "wandb", "tensorboard"]
    assert [next(name for name in fails if name in text) for text in failed] == order
    assert all(calls.count((name, method)) == 1 for name, method in fails.items())
    assert ("trackio", "finish") in calls
