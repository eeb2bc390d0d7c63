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


def test_commands_name_what_is_there(tmp_path):
    """Every file and every setting in a command exists: a misspelt one would show only on a GPU."""
    from smelt.pipeline.plan.load_plan import load_plan

    training = next(each for each in gpu.parts() if each.name == "training-bf16").command
    overrides = tuple(training[at + 1] for at, word in enumerate(training) if word == "--set")
    plan = load_plan("quickstart", [o for o in overrides if o != "device=cuda"], "recovered")
    assert plan.steps[-1].settings.precision == "bf16"
    assert (ROOT / "benchmarks" / "recipes" / "gpu.yaml").is_file()
    plan = load_plan(ROOT / gpu.ORT, ["device=auto"])
    assert [step.settings.target for step in plan.steps if step.stage == "onnx"] == ["ort-tensorrt"] * 3
    compile(gpu.BITSANDBYTES, "bitsandbytes", "exec")


def test_a_part_gets_the_libraries_that_it_is_for(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/there")
    monkeypatch.setenv("SMELT_TENSORRT_10", "/ten")
    found = {each.name: each.environment["LD_LIBRARY_PATH"] for each in gpu.parts()}
    assert {name for name, path in found.items() if path == "/ten:/there"} == {"ort-tensorrt"}
    assert set(found.values()) == {"/ten:/there", "/there"}
