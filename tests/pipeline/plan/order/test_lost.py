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
UNEVEN = ("prune", {"scope": "global"})
MASKS = ("finetune", {"masks": {}})
NARROWER = ("finetune", {"masks": {"what": ["width"]}})
DIVIDED = ("share", {"difference": {"rank": 2}})
MOVED = ("finetune", {"sparsify": {}})
PARTS = ("depth", {"what": ["attention"]})
LEARNED_PARTS = ("finetune", {"masks": {"what": [], "parts": ["attention"]}})
GPTQ = ("quantize", {"scheme": "int4", "method": "gptq"})


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((PATTERN, "prune"), "n:m pattern of 'sparsify-0' no longer holds; prune before 'sparsify-0'."),
        ((PATTERN, "finetune", "prune"), "n:m pattern of 'sparsify-0'"),
        (("finetune", "depth"), "what 'finetune-0' trained with them, and nothing trains afterwards"),
        (("distill", "prune", "depth"), "what 'distill-0' trained"),
        (("finetune", "distill", "depth"), "what 'distill-1' trained"),
        (("shortlist", "vocabulary"), "put vocabulary before 'shortlist-0'."),
        (
            ("prune", UNEVEN, "finetune", "share"),
            "'prune-1' leaves layers of different sizes, which stay apart",
        ),
        ((MASKS, "share"), "'finetune-0' leaves layers of different sizes"),
        ((PATTERN, MASKS), "n:m pattern of 'sparsify-0' no longer holds; cut units before 'sparsify-0'."),
        ((PATTERN, NARROWER), "n:m pattern of 'sparsify-0' no longer holds; cut units before 'sparsify-0'."),
        (("sparsify", DIVIDED), "the zeros of 'sparsify-0' are lost; share before 'sparsify-0'."),
        ((MOVED, DIVIDED), "the zeros of 'finetune-0' are lost; share before 'finetune-0'."),
        ((PARTS, "prune", "depth"), "take layers away before 'depth-0'."),
        ((LEARNED_PARTS, "depth", "finetune"), "take layers away before 'finetune-0'."),
        ((PARTS, ("distill", {"student": {"layers": 1}})), "take layers away before 'depth-0'."),
        ((GPTQ, "distill"), "those which 'quantize-0' chose with care are lost; train with lora"),
    ],
)
def test_work_that_is_lost_is_told_once(steps, said):
    (text,) = told(*steps)
    assert said in text


@pytest.mark.parametrize(
    "steps",
    [
        (("sparsify", {"sparsity": 0.5}), "prune"),
        ("depth", PARTS, "distill"),
        ("sparsify", "share"),
        (DIVIDED, "sparsify"),
        ("sparsify", DIVIDED, "sparsify"),
        (PARTS, PARTS),
        ("prune", PATTERN),
        (PATTERN, "prune", PATTERN),
        ("finetune", "depth", "finetune"),
        ("finetune", "depth", "prune", "distill"),
        ("depth", "finetune"),
        ("vocabulary", "shortlist"),
        ("shortlist", "vocabulary", "shortlist"),
        ("share", UNEVEN),
        ("prune", "share"),
        (NARROWER, "share"),
        (MASKS, PATTERN),
        ("quantize", "finetune"),
        (GPTQ, ("finetune", {"lora": {}})),
    ],
)
def test_what_is_not_lost_or_made_anew_is_not_told(steps):
    assert told(*steps) == []
