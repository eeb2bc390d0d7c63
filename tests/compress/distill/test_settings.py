"""What `distill` leaves to the task: temperature, and how much labels count."""

import pytest

from smelt.compress.distill.settings import DistillSettings
from smelt.pipeline.plan.load_plan import load_plan
from tests.support.models import tiny


@pytest.mark.parametrize(("task", "options", "temperature", "logits", "labels"), [
    ("translation", {}, 1.0, 1.0, 0.0), ("summarization", {}, 1.0, 1.0, 0.0),
    ("language-modeling", {}, 1.0, 1.0, 0.0), ("text-classification", {}, 1.0, 1.0, 0.5),
    ("image-classification", {}, 1.0, 1.0, 0.5), ("sentence-similarity", {}, 1.0, 1.0, None),
    # what is said stays
    ("translation", {"temperature": 3.0, "losses": {"labels": 0.25}}, 3.0, 1.0, 0.25),
    ("text-classification", {"temperature": 1.0, "losses": {"labels": 0}}, 1.0, 1.0, 0.0),
    # without the teacher something has to count; rows without labels have none
    ("translation", {"losses": {"logits": 0}}, 1.0, 0.0, 1.0),
    ("translation", {"losses": {"logits": 0, "hidden_states": 1}}, 1.0, 0.0, 1.0),
    ("text-classification", {"train_on": "unlabeled"}, 1.0, 1.0, 0.0),
    # and is refused
    ("text-classification", {"train_on": "unlabeled", "losses": {"logits": 0}}, 1.0, 0.0, 0.5),
    ("text-classification", {"train_on": "both"}, 1.0, 1.0, 0.0),
])  # fmt: skip
def test_default_losses_and_temperature_depend_on_task(task, options, temperature, logits, labels):
    resolved = DistillSettings.model_validate(options).resolve_for_task(task)
    assert (resolved.temperature, resolved.losses.logits, resolved.losses.labels) == (
        temperature,
        logits,
        labels,
    )
    assert resolved.resolve_for_task(task) == resolved  # nothing is decided twice


def test_phase_losses_do_not_get_task_defaults():
    phased = DistillSettings.model_validate(
        {"phases": [{"losses": {"hidden_states": 1}}, {"losses": {"logits": 1}}]}
    )
    resolved = phased.resolve_for_task("text-classification")
    assert resolved == phased
    assert [training.losses.labels for training in resolved.phase_settings()] == [0.0, 0.0]


def test_plan_stores_task_defaults(tmp_path):
    tiny.write_marian(tmp_path / "model")
    tiny.write_pairs(tmp_path / "rows.jsonl")
    (tmp_path / "r.yaml").write_text(
        "model: model\ntask: translation\nstages: [distill]\n"
        "data: {train: rows.jsonl, validation: rows.jsonl, test: rows.jsonl}\n"
    )
    settings = load_plan(tmp_path / "r.yaml").step("distill").settings.model_dump(mode="json")
    losses = {name: weight for name, weight in settings["losses"].items() if weight is not None}
    assert (settings["temperature"], losses) == (1.0, {"logits": 1.0, "labels": 0.0})
