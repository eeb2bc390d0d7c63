"""The plan of what needs a GPU: its order and limits, results at once, going on, and what is recorded."""

import importlib.util
import json
import os
import subprocess
import sys

import gpu
import pytest

pytestmark = pytest.mark.quick
MACHINE = {"commit": "abc1234", "gpu": "NVIDIA H200, 143771 MiB, 610.1, 9.0"}


def script_part(name, code, seconds=60, **fields):
    return gpu.Part(name, f"does {name}", (sys.executable, "-S", "-c", code), seconds, **fields)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts the plan with parts of its own, and returns its exit code."""
    monkeypatch.setattr(gpu, "describe_machine", lambda: MACHINE)
    monkeypatch.delenv("OUT", raising=False)
    paths = ["--results", str(tmp_path / "results"), "--runs-file", str(tmp_path / "runs.json")]
    return lambda known, *arguments: gpu.main([*paths, *arguments], known)


def codes(tmp_path):
    return {name: outcome.code for name, outcome in gpu.read_results(tmp_path / "results").items()}


def test_torch_and_onnxruntime_fit_into_nine_minutes_in_this_order():
    known = gpu.parts()
    names = [part.name for part in known]
    assert names.index("training") < names.index("ort-cuda") < names.index("tensorrt")
    assert sum(part.seconds for part in known[: names.index("tensorrt")]) <= 9 * 60


def test_recorded_parts_equal_the_plan():
    """After a change of the plan: `python benchmarks/gpu.py --record`, then `make docs`."""
    entries = json.loads(gpu.RUNS_FILE.read_text())
    assert [(e["part"], e["what"]) for e in entries] == [(p.name, p.description) for p in gpu.parts()]


def test_second_start_runs_missing_parts_before_failed_ones(start, tmp_path):
    log = tmp_path / "log"
    note = f"open({str(log)!r}, 'a').write('%s '); raise SystemExit(%d)"
    known = [script_part(name, note % (name, code)) for name, code in (("a", 0), ("b", 3), ("c", 0))]
    assert start(known, "--only", "a", "b") == 1
    assert codes(tmp_path) == {"a": 0, "b": 3}
    assert start(known) == 1
    assert log.read_text().split() == ["a", "b", "c", "b"]


def test_each_result_is_written_before_the_next_part_starts(start, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("OUT", str(out))
    check = f"import os; raise SystemExit(not os.path.exists({str(out / 'first.json')!r}))"
    assert start([script_part("first", "print('done')"), script_part("second", check)]) == 0
    content = json.loads((out / "first.json").read_text())
    assert (content["output"], content["commit"], content["gpu"]) == ("done", *MACHINE.values())


def test_part_over_its_time_is_stopped_and_not_recorded(start, tmp_path):
    code = "import time; print('begun', flush=True); time.sleep(60)"
    assert start([script_part("slow", code, seconds=1)]) == 1
    assert codes(tmp_path) == {"slow": None}
    assert "begun" in gpu.read_results(tmp_path / "results")["slow"].output
    assert json.loads((tmp_path / "runs.json").read_text())[0]["executed"] is None


def test_no_part_is_begun_after_the_time_of_all(start, tmp_path):
    start([script_part("never", "")], "--minutes", "0.1")
    assert codes(tmp_path) == {}


def test_success_is_recorded_and_kept_when_the_part_fails_later(start, tmp_path):
    start([script_part("a", "")])
    first = json.loads((tmp_path / "runs.json").read_text())
    assert first[0]["executed"] | {"finished": ""} == MACHINE | {"finished": ""}
    (tmp_path / "results" / "a.json").unlink()
    start([script_part("a", "raise SystemExit(1)")])
    assert json.loads((tmp_path / "runs.json").read_text()) == first


def test_part_without_its_packages_is_left_out(start, tmp_path):
    start([script_part("a", "", needs=("a_package_that_nobody_has",)), script_part("b", "")])
    assert codes(tmp_path) == {"b": 0}


def test_rehearsal_records_nothing(start, tmp_path):
    assert start([script_part("a", "")], "--rehearse") == 0
    assert not (tmp_path / "runs.json").exists()
    assert codes(tmp_path) == {}
    assert all("device=cuda" not in argument for part in gpu.parts(device="cpu") for argument in part.command)


def test_script_without_gpu_prints_its_plan():
    command = ["bash", "benchmarks/gpu.sh", "--only", "training"]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, check=True)
    assert "device=cuda" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed here")
def test_rehearsed_engines_are_built_with_the_rig_of_the_tests(monkeypatch, tmp_path):
    """Only where TensorRT is missing; the process then finds the rig's package."""
    from tests.support.processes import tensorrt_rig

    (tmp_path / "tensorrt").mkdir()
    (tmp_path / "tensorrt" / "__init__.py").write_text("")
    environment = {"PYTHONPATH": str(tmp_path), "LD_LIBRARY_PATH": "libraries"}
    monkeypatch.setattr(tensorrt_rig, "environment", lambda: environment)
    part = script_part("engines", "", needs=("tensorrt", "json"))
    assert part.missing == "tensorrt"
    rehearsed = gpu.on_rig(part)
    assert rehearsed.missing == ""
    assert rehearsed.environment["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    other = script_part("other", "", needs=("a_package_that_nobody_has",))
    assert gpu.on_rig(other) == other
