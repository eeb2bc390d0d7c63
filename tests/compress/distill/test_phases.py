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


def test_inner_losses_come_first_then_the_words(tmp_path, rows):
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
        f"{what}.{stack}"
        for what in ("hidden_states", "attention")
        for stack in ("encoder_layers", "decoder_layers")
    }
    assert (first["steps"], set(first["train_losses"])) == (30, parts)
    assert (second["steps"], set(second["train_losses"])) == (20, {"logits"})
    assert ctx.details["training"] == second
    for phase in (first, second):
        start, *later = [found["loss"] for found in phase["validations"]]
        assert min(later) < 0.7 * start
    assert not [
        m for m in harness.load_output_model(ctx).modules() if "projection" in type(m).__name__.lower()
    ]


def test_a_warning_says_of_which_phase_it_is(tmp_path, rows):
    quick = {"max_steps": 2, "num_evals": 1, "batch_size": 5, "precision": "fp32", "max_length": 4}
    quick |= {"lr_schedule": "constant", "warmup": 0.0, "learning_rate": 1e-3, "dropout": 0.0}
    phases = [{"losses": {"hidden_states": 1}}, {"losses": {"labels": 1}, "learning_rate": 100.0}]
    settings = DistillSettings.model_validate(quick | {"student": {"decoder_layers": 1}, "phases": phases})
    ctx = harness.run_stage(
        Distill(), settings, tiny.write_marian(tmp_path / "model"), tmp_path / "out", data=rows
    )
    assert [phase["kept_step"] for phase in ctx.details["phases"]] == [2, 0]
    (useless,) = [one for one in ctx.warnings if one.code == "no-improvement"]
    assert useless.message.startswith("phase 2: ")
    cut = [one.message for one in ctx.warnings if one.code == "truncated-texts"]
    assert cut  # of all phases, said once
    assert len(set(cut)) == len(cut)
    assert not [text for text in cut if "phase" in text]


def test_what_a_phase_does_not_say_is_as_the_step_says():
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


@pytest.mark.parametrize(
    ("options", "setting", "code", "value"),
    [
        ({"losses": {"hidden_states": 1}, "layer_map": {4: 1}}, "layer_map", "unknown-layer", "4"),
        (
            {"losses": {"hidden_states": 1}, "student": {"layers": 1}, "layer_map": {2: 1}},
            "layer_map",
            "unknown-layer",
            "2",
        ),
        ({"losses": {"reverse_kl": 1}}, "losses.reverse_kl", "problem-type-mismatch", ""),
        (
            {"phases": [{"losses": {"reverse_kl": 1}}]},
            "phases.0.losses.reverse_kl",
            "problem-type-mismatch",
            "",
        ),
    ],
)
def test_the_plan_knows_what_a_student_does_not_have(options, setting, code, value):
    config = {"model_type": "bert", "num_hidden_layers": 3, "problem_type": "regression"}
    (found,), _ = Distill.check_model(DistillSettings.model_validate(options), config)
    assert (found.setting, found.code) == (setting, code)
    assert value in found.message


def test_the_plan_names_families_whose_scores_cannot_be_read():
    config = {"model_type": "mpnet", "num_hidden_layers": 3}
    (found,), _ = Distill.check_model(DistillSettings.model_validate({"losses": {"attention": 1}}), config)
    assert (found.setting, found.code) == ("losses.attention", "unreadable-attention")
    assert "mpnet" in found.message


def test_vocabularies_that_differ_are_refused(tmp_path, rows):
    source, other = tiny.write_bert(tmp_path / "a"), tiny.write_bert(tmp_path / "b", vocab_size=50)
    with (other / "vocab.txt").open("a") as file:
        file.write("\nextra\n")
    artifact = tiny.as_artifact(source, "text-classification")
    ancestors = {"model": artifact, "big": tiny.as_artifact(other, "text-classification")}
    ctx = harness.make_context(tmp_path / "out", "text-classification", rows, ancestors=ancestors)
    with raises_code("vocabulary-mismatch", InputError) as caught:
        Distill()(artifact, DistillSettings(teacher="big"), ctx)
    assert "50" in str(caught.value)
