"""benchmarks/gpu.sh: what it says without a GPU, and what it writes of parts that end well, badly or not."""

import os
import subprocess
import sys
from pathlib import Path

import benchmarks_path  # noqa: F401 -- before what lies in benchmarks
import gpu
import pytest

from smelt.pipeline.inspect.machine import has_cuda

ROOT = Path(__file__).resolve().parents[2]


def part(name, code, seconds=60, report=None):
    return gpu.Part(name, f"the {name}", (sys.executable, "-c", code), seconds, report)


@pytest.mark.skipif(has_cuda(), reason="there it would run")
def test_without_a_gpu_every_part_says_what_it_would_do_and_nothing_is_written():
    page = ROOT / "docs" / "measurements" / "gpu.md"
    before = page.read_bytes() if page.exists() else None
    done = subprocess.run(
        [ROOT / "benchmarks" / "gpu.sh"], cwd="/", capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "nothing is run and nothing is written" in done.stdout
    for each in gpu.parts():
        assert f"\n{each.name} (at most {each.seconds} s) would do: {each.description}\n" in done.stdout
    assert (page.read_bytes() if page.exists() else None) == before


def test_all_parts_together_take_no_more_than_thirty_minutes():
    assert sum(each.seconds for each in gpu.parts()) <= 30 * 60


def test_page_tells_what_ended_well_what_failed_and_what_was_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "_MIN_SECONDS", 0)
    (tmp_path / "report.md").write_text("# The run\n\nA table.\n")
    known = [
        part("good", "print('all went well')", report=tmp_path / "report.md"),
        part("bad", "raise SystemExit('no such kernel')", report=tmp_path / "report.md"),
        part("slow", "import time; print('begun', flush=True); time.sleep(60)", seconds=3),
    ]
    assert gpu.main(["--out", str(tmp_path / "gpu.md")], known) == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "| good | the good | done |" in text
    assert "| bad | the bad | **failed** (exit code 1) |" in text
    assert "| slow | the slow | stopped: its time was up |" in text
    for words in ("all went well", "no such kernel", "begun\nstopped after 3 s", "### The run\n\nA table."):
        assert words in text
    assert f"written: {tmp_path / 'gpu.md'}" in capsys.readouterr().out


def test_part_for_which_no_time_is_left_is_not_begun_and_said_so(tmp_path):
    known = [part("late", "print('ran')")]
    assert gpu.main(["--out", str(tmp_path / "gpu.md"), "--minutes", "0.1"], known) == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "| late | the late | not begun | 0 |" in text
    assert "not begun: the time of the whole script was up" in text


def test_only_the_parts_that_are_asked_for_run(tmp_path):
    known = [part("one", "print(1)"), part("two", "raise SystemExit(1)")]
    assert gpu.main(["--only", "one", "--out", str(tmp_path / "gpu.md")], known) == 0
    assert "two" not in (tmp_path / "gpu.md").read_text()


def test_commands_name_what_is_there(tmp_path):
    """Every file and every setting in a command exists: a misspelt one would show only on a GPU."""
    from smelt.pipeline.plan.load_plan import load_plan

    training = next(each for each in gpu.parts() if each.name == "training-bf16").command
    overrides = tuple(training[at + 1] for at, word in enumerate(training) if word == "--set")
    plan = load_plan("quickstart", [o for o in overrides if o != "device=cuda"], "recovered")
    assert plan.steps[-1].settings.precision == "bf16"
    assert (ROOT / "benchmarks" / "recipes" / "gpu.yaml").is_file()
    for name in ("ort-tensorrt", "ort-tensorrt-rtx"):
        command = next(each for each in gpu.parts() if each.name == name).command
        changed = [command[at + 1] for at, word in enumerate(command) if word == "--set"]
        plan = load_plan(ROOT / gpu.ORT, [*changed, "device=auto"])
        targets = [step.settings.target for step in plan.steps if step.stage == "onnx"]
        assert targets == [name] * 3
    compile(gpu.BITSANDBYTES, "bitsandbytes", "exec")


def test_a_part_gets_the_libraries_that_it_is_for(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/there")
    monkeypatch.setenv("SMELT_TENSORRT_10", "/ten")
    found = {each.name: each.environment["LD_LIBRARY_PATH"] for each in gpu.parts()}
    assert {name for name, path in found.items() if path == "/ten:/there"} == {"ort-tensorrt"}
    assert set(found.values()) == {"/ten:/there", "/there"}
