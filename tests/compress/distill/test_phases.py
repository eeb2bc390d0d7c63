"""Trainings one after the other, and what the plan says of losses that cannot be."""

import pytest

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.core.errors import InputError
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.models import tiny

SHORT = {"max_steps": 20, "batch_size": 5, "learning_rate": 3e-3, "precision": "fp32", "dropout": 0.0}


@pytest.fixture
def rows(tmp_path):
    return tiny.read_pairs(tmp_path)


def test_hidden_state_phase_runs_before_logits_phase(tmp_path, rows):
    source = tiny.write_marian(tmp_path / "model")
    options = {
        "student": {"decoder_layers": 1},
        "phases": [
            {"losses": {"hidden_states": 1, "attention": 1}, "max_steps": 30},
            {"losses": {"logits": 1}, "learning_rate": 1e-3},
        ],
    }
    settings = DistillSettings.model_validate(SHORT | options)
    ctx = harness.run_stage(Distill(), settings, source, tmp_path / "out", data=rows)
    first, second = ctx.details["phases"]
    parts = {
        f"{loss_name}.{stack}"
        for loss_name in ("hidden_states", "attention")
        for stack in ("encoder_layers", "decoder_layers")
    }
    assert (first["steps"], set(first["train_losses"])) == (30, parts)
    assert (second["steps"], set(second["train_losses"])) == (20, {"logits"})
    assert ctx.details["training"] == second
    for phase in (first, second):
        start, *later = [validation["loss"] for validation in phase["validations"]]
        assert min(later) < 0.7 * start
    assert not [
        m for m in harness.load_output_model(ctx).modules() if "projection" in type(m).__name__.lower()
    ]


def test_warning_names_its_phase(tmp_path, rows):
    quick = {"max_steps": 2, "num_evals": 1, "batch_size": 5, "precision": "fp32", "max_length": 4}
    quick |= {"lr_scheduler_type": "constant", "warmup_steps": 0.0, "learning_rate": 1e-3, "dropout": 0.0}
    phases = [{"losses": {"hidden_states": 1}}, {"losses": {"labels": 1}, "learning_rate": 100.0}]
    settings = DistillSettings.model_validate(quick | {"student": {"decoder_layers": 1}, "phases": phases})
    ctx = harness.run_stage(
        Distill(), settings, tiny.write_marian(tmp_path / "model"), tmp_path / "out", data=rows
    )
    assert [phase["kept_step"] for phase in ctx.details["phases"]] == [2, 0]
    (no_improvement,) = [message for message in ctx.warnings if message.code == "no-improvement"]
    assert no_improvement.message.startswith("phase 2: ")
    cut = [message.message for message in ctx.warnings if message.code == "truncated-texts"]
    assert cut  # of all phases, said once
    assert len(set(cut)) == len(cut)
    assert not [text for text in cut if "phase" in text]


def test_phase_inherits_unset_settings_from_stage():
    settings = DistillSettings.model_validate(
        {
            "epochs": 3,
            "metric_for_best_model": "bleu",
            "phases": [{"losses": {"hidden_states": 1}, "epochs": 1}, {"losses": {"logits": 2}}],
        }
    )
    first, second = settings.phase_settings()
    assert (first.epochs, first.metric_for_best_model, first.losses.logits, first.losses.hidden_states) == (
        1,
        "loss",
        0,
        1,
    )
    assert (second.epochs, second.metric_for_best_model, second.losses.logits, second.losses.labels) == (
        3,
        "bleu",
        2,
        0,
    )
    with raises_setting_codes("settings-conflict"):
        DistillSettings.model_validate({"losses": {"logits": 1}, "phases": [{"losses": {"logits": 1}}]})
    with raises_setting_codes("no-loss", "too_short"):
        DistillSettings.model_validate({"phases": [{"losses": {"logits": 0}}]})


@pytest.mark.parametrize(("options", "setting", "code", "value"), [
    ({"losses": {"hidden_states": 1}, "layer_map": {4: 1}}, "layer_map", "unknown-layer", "4"),
    ({"losses": {"hidden_states": 1}, "student": {"layers": 1}, "layer_map": {2: 1}}, "layer_map",
     "unknown-layer", "2"),
    ({"losses": {"reverse_kl": 1}}, "losses.reverse_kl", "problem-type-mismatch", ""),
    ({"phases": [{"losses": {"reverse_kl": 1}}]}, "phases.0.losses.reverse_kl", "problem-type-mismatch", ""),
])  # fmt: skip
def test_phase_losses_unsupported_by_student_are_rejected_in_plan(options, setting, code, value):
    config = {"model_type": "bert", "num_hidden_layers": 3, "problem_type": "regression"}
    (error,), _ = Distill.check_model(DistillSettings.model_validate(options), config)
    assert (error.setting, error.code) == (setting, code)
    assert value in error.message


def test_attention_loss_is_rejected_for_unreadable_families():
    config = {"model_type": "mpnet", "num_hidden_layers": 3}
    (error,), _ = Distill.check_model(DistillSettings.model_validate({"losses": {"attention": 1}}), config)
    assert (error.setting, error.code) == ("losses.attention", "unreadable-attention")
    assert "mpnet" in error.message


def test_different_vocabularies_are_rejected(tmp_path, rows):
    source, other = tiny.write_bert(tmp_path / "a"), tiny.write_bert(tmp_path / "b", vocab_size=50)
    with (other / "vocab.txt").open("a") as file:
        file.write("\nextra\n")
    artifact = tiny.as_artifact(source, "text-classification")
    ancestors = {"model": artifact, "big": tiny.as_artifact(other, "text-classification")}
    ctx = harness.make_context(tmp_path / "out", "text-classification", rows, ancestors=ancestors)
    with raises_code("vocabulary-mismatch", InputError) as caught:
        Distill()(artifact, DistillSettings(teacher="big"), ctx)
    assert "50" in str(caught.value)
