"""How long the trainings of a proposed recipe are said to take."""

import json

import causal
import pytest
import tiny

from smelt.look import effort
from smelt.look.data import DataLook, look_at_data
from smelt.look.effort import training_time
from smelt.look.init_stages import Step
from smelt.look.model import look


@pytest.fixture
def slow(monkeypatch):
    """A processor of which the reckoning is easy."""
    monkeypatch.setattr(effort, "_operations_per_second", lambda: 1e6 / effort._REACHED)


def test_a_translator_reads_each_row_with_either_half(tmp_path, slow):
    """Kaplan et al. 2020: 6 operations a weight and token to train, 2 for a teacher to read it."""
    seen = look(str(tiny.marian(tmp_path / "m")), "translation")
    rows = tmp_path / "train.jsonl"
    rows.write_text((json.dumps({"source": "a" * 20, "target": "b" * 12}) + "\n") * 1000)
    data = look_at_data([rows], "translation")
    kept = 1 - sum(data.shares.values())
    tokens = (20 + 12) / 4 / 2
    steps = [
        Step("finetune", "{epochs: 2}"),
        Step("prune", "{}"),
        Step("distill", "{epochs: 0.5, num_evals: 1}"),
    ]
    seconds = (2 * 6 + 0.5 * 8) * seen.parameters * 1000 * kept * tokens / 1e6
    said = training_time(seen, data, steps)
    assert "2.5 passes over 800 rows" in said
    assert f"roughly {effort._told(seconds)}" in said
    # people's texts stand beside what the teacher writes, with as many beams
    written = [Step("distill", "{epochs: 2, sequence_level: {num_beams: 5, original_ratio: 0.5}}")]
    seconds = (4 * 8 + 5 * 2) * seen.parameters * 1000 * kept * tokens / 1e6
    assert f"4 passes over 800 rows: on this processor roughly {effort._told(seconds)}" in training_time(
        seen, data, written
    )
    # one that says no epochs takes the default
    assert "3 passes" in training_time(seen, data, [Step("finetune")])


def test_lookups_of_a_classifier_are_no_work(tmp_path, slow):
    seen = look(str(tiny.bert(tmp_path / "m")), "text-classification")
    looked_up = seen.config["vocab_size"] * seen.config["hidden_size"]
    assert effort._looked_up(seen) == looked_up < seen.parameters


def test_running_text_is_told_by_its_lines(tmp_path, slow):
    seen = look(str(causal.model(tmp_path / "m", "gpt2")), "language-modeling")
    (tmp_path / "train.txt").write_text("\n".join(["some forty letters of a text, all of it."] * 100))
    data = look_at_data([tmp_path / "train.txt"], "language-modeling")
    seconds = 6 * seen.parameters * 4099 * (1 - sum(data.shares.values())) / 4 / 1e6
    assert effort._told(seconds) in training_time(seen, data, [Step("finetune", "{epochs: 1}")])


def test_nothing_is_said_where_nothing_trains(tmp_path, slow):
    seen = look(str(tiny.marian(tmp_path / "m")), "translation")
    data = look_at_data([tiny.pairs(tmp_path / "train.jsonl", 10)], "translation")
    assert training_time(seen, data, [Step("prune"), Step("onnx")]) is None
    assert training_time(seen, DataLook({"test": tmp_path / "train.jsonl"}), [Step("finetune")]) is None


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(20, "a minute"), (100, "1.7 minutes"), (3000, "50 minutes"), (9000, "2.5 hours"), (2e5, "2.3 days")],
)
def test_times_are_told_to_two_digits(seconds, said):
    assert effort._told(seconds) == said
