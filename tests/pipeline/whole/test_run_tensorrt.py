"""A recipe with TensorRT steps on a machine that can build engines and not run them.

`smelt` runs in processes of its own, in the environment of the rig (tests/support/processes/tensorrt_rig.py).
"""

import json
import os
import stat
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from smelt.core.artifact import read_artifact
from smelt.evaluate.report.schema import validate_report
from smelt.pipeline.inspect.machine import has_cuda
from tests.support.models import tiny
from tests.support.processes import tensorrt_rig
from tests.support.processes.fork_server import ForkServer

RECIPE = """
model: m
task: text-classification
data: {validation: data.jsonl, test: data.jsonl}
stages:
  - onnx: {target: tensorrt, dtype: fp16}
    name: graphs
  - tensorrt: {optimization_level: 0, max_batch_size: 4, timing_cache: false}
    name: engine
score: {quality: [accuracy], latency: false}
gates:
  accuracy: {min: 0, at: [graphs, engine]}
  size_bytes: {max: 10000000, at: [engine]}
"""
UMASK = 0o077
pytestmark = pytest.mark.skipif(has_cuda(), reason="here engines can be run")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    tiny.write_bert(folder / "m")
    tiny.write_labeled(folder / "data.jsonl", 8)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def smelt(home):
    """A function that runs `smelt ARGUMENTS` in the rig: exit code and output of a process of its own."""
    environment = tensorrt_rig.rig_environment()
    with ExitStack() as stack:
        before = os.umask(UMASK)
        try:
            server = stack.enter_context(ForkServer(environment))
        finally:
            os.umask(before)

        def run(*arguments):
            server.start(*arguments, output=home / "output.txt")
            return SimpleNamespace(returncode=server.wait(), stdout=(home / "output.txt").read_text())

        yield run


@pytest.fixture(scope="module")
def done(home, smelt):
    """The finished first run: its outcome, its folder and its report."""
    result = smelt("run", home / "recipe.yaml", "--out", home / "r", "--store", home / "s")
    assert (home / "r" / "report.json").is_file(), result.stdout
    report = json.loads((home / "r" / "report.json").read_text())
    validate_report(report)
    return result, home / "r", {step["name"]: step for step in report["steps"]}, report


def test_engine_artifact_has_all_files_for_runner(done):
    result, folder, steps, _ = done
    engine = steps["engine"]
    assert (engine["status"], engine["error"]) == ("done", None), result.stdout
    artifact = read_artifact(folder / "artifacts" / "engine")
    artifact.verify()
    files = set(artifact.manifest.files)
    assert {"model.plan", "config.json", "tokenizer_config.json", "vocab.txt"} <= files
    assert artifact.format == "tensorrt"
    weights = 2 * steps["model"]["parameters"]  # fp16
    plans = {p.name: p.stat().st_size for p in artifact.path.glob("*.plan")}
    assert engine["size_bytes"] == sum(plans.values()) > weights
    assert artifact.manifest.details["tensorrt"].startswith("tensorrt 11.")
    assert artifact.manifest.details["profile"] == {"batch": [1, 1, 4], "input": [1, 8, 16]}


def test_engine_files_follow_umask(done):
    _, folder, _, _ = done
    files = list((folder / "artifacts" / "engine").resolve().iterdir())
    assert "model.plan" in {path.name for path in files}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~UMASK}


def test_report_states_that_engine_requires_gpu(done):
    result, folder, steps, report = done
    engine = steps["engine"]
    assert engine["cause"] == "cannot-run-here"
    assert (engine["quality"], engine["latency"], engine["runner"]) == ({}, [], None)
    assert "engine" not in report["pareto_front"]
    assert steps["graphs"]["quality"]["accuracy"]["n"] == 8
    # its graphs were scored on the CPU, which is not their runtime
    assert (steps["graphs"]["device"], steps["graphs"]["deployable"]) == ("cpu", False)
    assert "scored in onnxruntime on the CPU" in " ".join(result.stdout.split())
    for text in (folder / "report.md", folder / "report.html"):
        assert "not scored" in text.read_text()
        assert engine["reason"] in text.read_text()
    assert "'engine': not scored: scoring needs a CUDA GPU" in " ".join(result.stdout.split())


def test_gate_on_unscored_engine_is_not_judged(done):
    result, _, steps, report = done
    gates = {(gate["metric"]): gate for gate in steps["engine"]["gates"]}
    assert gates["accuracy"]["passed"] is None
    assert gates["accuracy"]["cause"] == "cannot-run-here"
    assert (gates["size_bytes"]["passed"], gates["size_bytes"]["cause"]) == (True, None)
    assert [gate["passed"] for gate in steps["graphs"]["gates"]] == [True]
    # the recipe wants this gate and the step is not optional: nobody should deploy on it
    assert (report["status"], result.returncode) == ("gate-failed", 3)
    assert "'engine': gate not judged: Accuracy – (at least 0.00)\n" in result.stdout


def test_cached_optional_engine_does_not_fail_run(home, smelt, done):
    out = home / "again"
    result = smelt(
        "run", home / "recipe.yaml", "--out", out, "--store", home / "s",
        "--set", "engine.optional=true",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    report = json.loads((out / "report.json").read_text())
    assert [step["status"] for step in report["steps"]] == ["cached"] * 3
    assert report["steps"][2]["cause"] == "cannot-run-here"


def test_plan_shows_engine_as_built_and_not_scored(home, smelt):
    result = smelt("plan", home / "recipe.yaml")
    assert result.returncode == 0, result.stdout
    assert "built, not scored (needs a CUDA GPU)" in " ".join(result.stdout.split())


def test_lengths_beyond_positions_fail_step_with_hint(home, smelt, done):
    result = smelt(
        "run", home / "recipe.yaml", "--out", home / "long", "--store", home / "s",
        "--set", "engine.lengths={opt: 8, max: 400}",
    )  # fmt: skip
    assert result.returncode == 1
    steps = json.loads((home / "long" / "report.json").read_text())["steps"]
    assert steps[2]["status"] == "error"
    assert steps[2]["error"]["code"] == "unsupported-graph"
    assert all(value in steps[2]["error"]["message"] for value in ("400", "32", "tensorrt: {lengths: ...}"))
