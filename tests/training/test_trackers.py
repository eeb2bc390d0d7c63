"""Experiment trackers: what is missing is said by the plan; TensorBoard writes into the run's folder."""

import os

import harness
import pytest
import tiny
from pydantic import ValidationError

from smelt.compress.finetune import FinetuneSettings
from smelt.core import system
from smelt.training import trainer

RECIPE = """
model: m
task: translation
data: {train: rows.jsonl, test: rows.jsonl}
stages:
  - finetune: {max_steps: 1, report_to: [swanlab, tensorboard]}
score: {latency: false}
"""


def test_a_tracker_that_is_not_installed_is_said_by_the_plan_and_before_any_work(tmp_path, monkeypatch):
    def installed(package):
        if package == "swanlab":
            raise system.PackageNotFoundError
        return "99.0"

    monkeypatch.setattr(system, "version", installed)
    tiny.write_marian(tmp_path / "m")
    tiny.write_pairs(tmp_path / "rows.jsonl")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    output = " ".join(harness.smelt("plan", tmp_path / "recipe.yaml").stdout.split())
    assert "swanlab>=0.5" in output
    ran = harness.smelt("run", tmp_path / "recipe.yaml", "--out", tmp_path / "out", code=2)
    assert "error[step-unavailable]" in ran.output
    assert "swanlab>=0.5" in ran.output
    assert not (tmp_path / "out").exists()


def test_trackers_are_no_part_of_what_a_step_is():
    settings = FinetuneSettings(report_to=["tensorboard", "wandb"])
    assert settings.model_dump(mode="json") == FinetuneSettings().model_dump(mode="json")
    assert settings.required_packages() == {"tensorboard": "2.18", "wandb": "0.18"}
    assert set(FinetuneSettings(report_to=["wandb"], lora={}).required_packages()) == {"peft", "wandb"}
    with pytest.raises(ValidationError):
        FinetuneSettings(report_to=["mlflow"])


@pytest.mark.parametrize("mine", [None, "elsewhere"])
def test_tensorboard_writes_into_the_run_unless_told_otherwise(tmp_path, monkeypatch, mine):
    monkeypatch.delenv(trainer._TENSORBOARD_VARIABLE, raising=False)
    if mine:
        monkeypatch.setenv(trainer._TENSORBOARD_VARIABLE, mine)
    ctx = harness.make_context(tmp_path / "out", tracker_folder=tmp_path / "logs" / "step")
    with trainer._tensorboard_in_run(FinetuneSettings(report_to=["tensorboard"]), ctx):
        assert os.environ[trainer._TENSORBOARD_VARIABLE] == (mine or str(tmp_path / "logs" / "step"))
    assert os.environ.get(trainer._TENSORBOARD_VARIABLE) == mine
    with trainer._tensorboard_in_run(FinetuneSettings(), ctx):
        assert os.environ.get(trainer._TENSORBOARD_VARIABLE) == mine
