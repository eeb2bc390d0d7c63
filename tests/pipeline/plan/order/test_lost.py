"""What a later step loses of an earlier one's work, as the stages themselves say it."""

import pytest

from smelt.plan.order.lost import lost_by
from smelt.recipe.stage_table import load_stage


def told(*steps):
    """What is said of the steps of one branch, in order; each a word, or a word and its settings."""
    done = []
    for number, step in enumerate(steps):
        word, settings = step if isinstance(step, tuple) else (step, {})
        stage = load_stage(word)
        done.append((f"{word}-{number}", stage, stage.settings_type.model_validate(settings)))
    return [
        text
        for at, step in enumerate(done)
        for text in lost_by(step, list(reversed(done[:at])), done[at + 1 :])
    ]


PATTERN = ("sparsify", {"pattern": "2:4"})


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((PATTERN, "prune"), "n:m pattern of 'sparsify-0' no longer holds; prune before 'sparsify-0'."),
        ((PATTERN, "finetune", "prune"), "n:m pattern of 'sparsify-0'"),
        (("finetune", "depth"), "what 'finetune-0' trained with them, and nothing trains afterwards"),
        (("distill", "prune", "depth"), "what 'distill-0' trained"),
        (("finetune", "distill", "depth"), "what 'distill-1' trained"),
    ],
)
def test_work_that_is_lost_is_told_once(steps, said):
    (text,) = told(*steps)
    assert said in text


@pytest.mark.parametrize(
    "steps",
    [
        (("sparsify", {"sparsity": 0.5}), "prune"),
        ("prune", PATTERN),
        (PATTERN, "prune", PATTERN),
        ("finetune", "depth", "finetune"),
        ("finetune", "depth", "prune", "distill"),
        ("depth", "finetune"),
    ],
)
def test_what_is_not_lost_or_made_anew_is_not_told(steps):
    assert told(*steps) == []
