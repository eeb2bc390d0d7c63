"""How long the trainings of a proposed recipe are said to take."""

import json

import pytest

from smelt.pipeline.inspect import init_stages
from smelt.pipeline.inspect.data_files import DataInfo, inspect_data
from smelt.pipeline.inspect.init_stages import ProposedStep, training_time_text
from smelt.pipeline.inspect.model_info import inspect_model
from tests.support.models import causal, tiny


@pytest.fixture
def slow(monkeypatch):
    """A processor of which the reckoning is easy."""
    monkeypatch.setattr(init_stages, "_operations_per_second", lambda: 1e6 / init_stages._COMPUTE_EFFICIENCY)


def test_translation_training_time_uses_encoder_and_decoder_lengths(tmp_path, slow):
    """Kaplan et al. 2020: 6 operations a weight and token to train, 2 for a teacher to read it."""
    info = inspect_model(str(tiny.write_marian(tmp_path / "m")), "translation")
    rows = tmp_path / "train.jsonl"
    rows.write_text((json.dumps({"source": "a" * 20, "target": "b" * 12}) + "\n") * 1000)
    data = inspect_data([rows], "translation")
    train_fraction = 1 - sum(data.fractions.values())
    tokens = (20 + 12) / 4 / 2
    steps = [
        ProposedStep("finetune", "{epochs: 2}"),
        ProposedStep("prune", "{}"),
        ProposedStep("distill", "{epochs: 0.5, num_evals: 1}"),
    ]
    seconds = (2 * 6 + 0.5 * 8) * info.parameters * 1000 * train_fraction * tokens / 1e6
    text = training_time_text(info, data, steps)
    assert all(number in text for number in ("2.5 epochs", "800 samples"))
    assert f"roughly {init_stages._duration_text(seconds)}" in text
    # labeled texts are used with those that the teacher generates, with as many beams
    written = [ProposedStep("distill", "{epochs: 2, sequence_level: {num_beams: 5, original_ratio: 0.5}}")]
    seconds = (4 * 8 + 5 * 2) * info.parameters * 1000 * train_fraction * tokens / 1e6
    text = training_time_text(info, data, written)
    assert all(number in text for number in ("4 epochs", "800 samples", init_stages._duration_text(seconds)))
    # one that says no epochs takes the default
    assert "3 epochs" in training_time_text(info, data, [ProposedStep("finetune")])


def test_classifier_embedding_lookups_are_not_counted(tmp_path, slow):
    info = inspect_model(str(tiny.write_bert(tmp_path / "m")), "text-classification")
    looked_up = info.config["vocab_size"] * info.config["hidden_size"]
    assert init_stages._embedding_parameters(info) == looked_up < info.parameters


def test_running_text_training_time_uses_line_lengths(tmp_path, slow):
    info = inspect_model(str(causal.write_model(tmp_path / "m", "gpt2")), "language-modeling")
    (tmp_path / "train.txt").write_text("\n".join(["some forty letters of a text, all of it."] * 100))
    data = inspect_data([tmp_path / "train.txt"], "language-modeling")
    seconds = 6 * info.parameters * 4099 * (1 - sum(data.fractions.values())) / 4 / 1e6
    assert init_stages._duration_text(seconds) in training_time_text(
        info, data, [ProposedStep("finetune", "{epochs: 1}")]
    )


def test_no_training_time_without_training_steps(tmp_path, slow):
    info = inspect_model(str(tiny.write_marian(tmp_path / "m")), "translation")
    data = inspect_data([tiny.write_pairs(tmp_path / "train.jsonl", 10)], "translation")
    assert training_time_text(info, data, [ProposedStep("prune"), ProposedStep("onnx")]) is None
    assert (
        training_time_text(info, DataInfo({"test": tmp_path / "train.jsonl"}), [ProposedStep("finetune")])
        is None
    )


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(20, "a minute"), (100, "1.7 minutes"), (3000, "50 minutes"), (9000, "2.5 hours"), (2e5, "2.3 days")],
)
def test_durations_are_rounded_to_two_digits(seconds, expected):
    assert init_stages._duration_text(seconds) == expected
