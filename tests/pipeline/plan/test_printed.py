"""What `smelt plan` prints, and its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.standins.stage_stand_ins import RECIPE_HEAD, STAGE_TREE, plan_stages

pytest_plugins = ["tests.support.standins.stage_stand_ins"]
pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("stand_ins")]


def test_plan_shows_tree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    plan_stages(folder, STAGE_TREE)
    text = str(load_plan(Path("recipe.yaml")))
    assert (
        text
        == """\
recipe.yaml: translation, 8 steps

model       model
train       train.jsonl (120 samples)
test        test.jsonl (101 samples)

model
distill -> torch  {student: {decoder_layers: 1}}  reads train
prune -> torch  {keep_ratio: 0.25}  reads train
prune-2 (prune) -> torch  reads train
small (factorize) -> torch
├─ quantize -> torch
│  onnx-int8 (onnx) -> onnx
└─ onnx -> onnx  {target: tensorrt}
   tensorrt -> tensorrt  will be skipped: TensorRT is not installed (pip install
       tensorrt, with an NVIDIA GPU).

score       bleu (13a), chrf, rouge1, rouge2, rougeL; greedy, up to the model's
            longest output; latency at batch size 1, 8 compared with model
gate        bleu: drop at most 1 at onnx-int8, onnx
gate        bleu: at least 20 at onnx-int8, onnx
gate        size_bytes: at most 1,000,000 at small"""
    )
    assert max(map(len, text.splitlines())) <= 80


def test_plan_shows_steps_that_cannot_run(folder: Path) -> None:
    text = str(plan_stages(folder, "[{onnx: {target: tensorrt}}, tensorrt]", until="tensorrt"))
    assert "CANNOT RUN: TensorRT is not installed" in text
    assert "cannot run on this machine: tensorrt." in " ".join(text.split())
    assert "until       tensorrt; excluded: none" in text


def test_plan_exits_with_2_if_step_cannot_run(folder: Path) -> None:
    path = folder / "recipe.yaml"
    for optional, code in (("false", 2), ("true", 0)):
        path.write_text(
            f"{RECIPE_HEAD}stages:\n  - onnx: {{target: tensorrt}}\n"
            f"  - {{tensorrt: {{}}, optional: {optional}}}\n"
        )
        done = harness.smelt("plan", path)
        assert done.exit_code == code
        assert ("CANNOT RUN" in done.output) == (code == 2)
