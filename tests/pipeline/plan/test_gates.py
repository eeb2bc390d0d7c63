"""Gates of a plan: which step each is on, and which is left out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from smelt.core.messages import message_codes
from smelt.data.tasks import task_traits
from smelt.pipeline.plan.check_context import CheckContext
from smelt.pipeline.plan.run_checks import choose_judging_split
from tests.support.expected_errors import message_locations
from tests.support.standins.stage_stand_ins import STAGE_TREE, plan_errors, plan_stages

pytest_plugins = ["tests.support.standins.stage_stand_ins"]
pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("stand_ins")]


def test_gates_apply_to_last_runnable_step_of_each_branch(folder: Path) -> None:
    plan = plan_stages(folder, STAGE_TREE)
    assert [(g.metric, g.kind, g.limit, g.at) for g in plan.gates] == [
        ("bleu", "max_degradation", 1.0, ("onnx-int8", "onnx")),
        ("bleu", "min", 20.0, ("onnx-int8", "onnx")),
        ("size_bytes", "max", 1e6, ("small",)),
    ]
    assert [g.metric for g in plan.gates_of("small")] == ["size_bytes"]


def test_gate_confidence_is_planned_and_shown(folder: Path) -> None:
    plan = plan_stages(folder, "[]\ngates: {bleu: {max_degradation: 1, confidence: 0.95}, chrf: {min: 9}}")
    assert [gate.confidence for gate in plan.gates] == [0.95, None]
    text = str(plan)
    assert "bleu: drop at most 1, with confidence 0.95 at model" in text
    assert "chrf: at least 9 at model" in text


def test_gate_without_stages_applies_to_model(folder: Path) -> None:
    assert plan_stages(folder, "[]\ngates: {bleu: {min: 1}}").gates[0].at == ("model",)


def test_until_does_not_move_gate_to_another_step(folder: Path) -> None:
    gates = (
        "\ngates: {bleu: {max_degradation: 1}, chrf: {max_degradation: 1, at: [prune, onnx]},"
        " size_bytes: {max: 9}}"
    )
    stages = "[prune, {quantize: {}, name: small}, onnx, {onnx: {}, from: prune, name: other}]" + gates
    every = plan_stages(folder, stages)
    assert [(g.metric, g.at) for g in every.gates] == [
        ("bleu", ("onnx", "other")),
        ("chrf", ("prune", "onnx")),
        ("size_bytes", ("onnx", "other")),
    ]
    assert every.warnings == ()
    partial_plan = plan_stages(folder, stages, until="small")
    assert [(g.metric, g.at) for g in partial_plan.gates] == [("chrf", ("prune",))]
    assert message_codes(partial_plan.warnings) == ["gate-not-judged"] * 3
    expected_gates = [("bleu", "onnx, other"), ("chrf", "onnx"), ("size_bytes", "onnx, other")]
    for warning, values in zip(partial_plan.warnings, expected_gates, strict=True):
        assert all(value in warning.message for value in values)
    branch = plan_stages(folder, stages, until="other")
    assert [(g.metric, g.at) for g in branch.gates] == [
        ("bleu", ("other",)),
        ("chrf", ("prune",)),
        ("size_bytes", ("other",)),
    ]


def test_drop_is_not_judged_if_baseline_is_excluded(folder: Path) -> None:
    stages = "[prune, {prune: {}, from: model, name: other}]"
    stages += "\nbaseline: prune\ngates: {bleu: {max_degradation: 1, min: 2}}"
    plan = plan_stages(folder, stages, until="other")
    assert [(g.metric, g.kind) for g in plan.gates] == [("bleu", "min")]
    [warning] = plan.warnings
    assert (warning.code, "'prune'" in warning.message) == ("no-comparison", True)


def test_speed_gate_is_skipped_if_latency_is_overridden_to_false(folder: Path) -> None:
    stages = "[prune]\ngates: {speedup: {min: 2}, bleu: {min: 1}}"
    plan = plan_stages(folder, stages, "score.latency=false")
    assert [g.metric for g in plan.gates] == ["bleu"]
    [warning] = plan.warnings
    assert (warning.code, "speedup" in warning.message) == ("gate-not-judged", True)
    assert f"warning {warning.message}" in " ".join(str(plan).split())
    assert message_locations(plan_errors(folder, stages + "\nscore: {latency: false}")) == [
        ("settings-conflict", "gates.speedup", 5)
    ]


def test_timed_step_names_must_exist(folder: Path) -> None:
    stages = "[prune]\nscore: {latency: {steps: [prune]}}"
    latency = plan_stages(folder, stages).recipe.score.latency
    assert latency
    assert [latency.is_timed(name, deployable=True) for name in ("prune", "model")] == [True, False]
    (error,) = plan_errors(folder, stages.replace("[prune]}}", "[prun]}}"))
    assert message_locations([error]) == [("unknown-step", "score.latency.steps", 5)]
    assert "'prune'?" in error.message


@pytest.mark.parametrize(("rows", "branches", "chosen", "same", "expected"), [
    (100, 2, None, False, "validation"), (99, 2, None, False, "test"),  # too few to choose by
    (None, 2, None, False, "validation"),  # a file that was not read is large
    (100, 1, None, False, "test"),  # nothing competes
    (100, 2, None, True, "test"),  # the same file
    (100, 2, "test", False, "test"), (5, 1, "validation", False, "validation"),
])  # fmt: skip
def test_branches_are_compared_on_validation_split(rows, branches, chosen, same, expected) -> None:
    files = {"validation": "v.jsonl", "test": "v.jsonl" if same else "t.jsonl"}
    data = SimpleNamespace(split_files=lambda: files, split_sources=lambda: files)
    recipe = SimpleNamespace(data=data, judged_on=chosen, traits=task_traits("translation"), stages=())
    steps = [
        SimpleNamespace(name=f"{i}", parent="model", unavailable=None, unscored=None) for i in range(branches)
    ]
    context = CheckContext(recipe, None, set(), drafts={step.name: step for step in steps})
    context.splits = {} if rows is None else {"validation": range(rows)}
    assert choose_judging_split(context) == expected


@pytest.mark.parametrize(
    ("head", "code"), [("", "does-not-fit-task"), ("baseline: onnx\n", "does-not-fit-model")]
)
def test_only_torch_models_that_run_once_are_compiled_as_baseline(folder: Path, head: str, code: str) -> None:
    stages = f"[onnx]\n{head}score: {{latency: {{baseline: eager}}}}"
    assert plan_stages(folder, stages).recipe.score.latency
    (error,) = plan_errors(folder, stages.replace("eager", "compiled"))
    assert (error.code, error.setting) == (code, "score.latency.baseline")


def test_compiled_baseline_requires_a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model/config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "model/vocab.txt").touch()
    (folder / "labels.csv").write_text("text,label\na,0\nb,1\n")
    head = "model: model\ntask: text-classification\ndata: {test: labels.csv}\n"
    stages = "[]\nscore: {latency: {baseline: compiled}}"
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/g++")
    assert plan_stages(folder, stages, head=head).steps == ()
    monkeypatch.setattr("shutil.which", lambda name: None)
    (error,) = plan_errors(folder, stages, head=head)
    assert (error.code, error.setting) == ("no-compiler", "score.latency.baseline")
