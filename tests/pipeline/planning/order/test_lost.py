"""What a later step loses of an earlier one's work, as the stages themselves say it."""

import pytest

from smelt.planning.order.lost import lost_by
from smelt.recipe.stage_table import load_stage


def told(*steps):
    """What is said of the steps of one branch, in order; each a word, or a word and its settings."""
    done = []
    for number, step in enumerate(steps):
        word, settings = step if isinstance(step, tuple) else (step, {})
        stage = load_stage(word)
        done.append((f"{word}-{number}", stage, stage.settings_type.model_validate(settings)))
    return [
        found
        for at, step in enumerate(done)
        for found in lost_by(step, list(reversed(done[:at])), done[at + 1 :])
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
    ("steps", "code", "maker"),
    [
        ((PATTERN, "prune"), "pattern-lost", "sparsify-0"),
        ((PATTERN, "finetune", "prune"), "pattern-lost", "sparsify-0"),
        (("finetune", "depth"), "training-lost", "finetune-0"),
        (("distill", "prune", "depth"), "training-lost", "distill-0"),
        (("finetune", "distill", "depth"), "training-lost", "distill-1"),
        (("shortlist", "vocabulary"), "shortlist-lost", "shortlist-0"),
        (("prune", UNEVEN, "finetune", "share"), "widths-lost", "prune-1"),
        ((MASKS, "share"), "widths-lost", "finetune-0"),
        ((PATTERN, MASKS), "pattern-lost", "sparsify-0"),
        ((PATTERN, NARROWER), "pattern-lost", "sparsify-0"),
        (("sparsify", DIVIDED), "zeros-lost", "sparsify-0"),
        ((MOVED, DIVIDED), "zeros-lost", "finetune-0"),
        ((PARTS, "prune", "depth"), "parts-lost", "depth-0"),
        ((LEARNED_PARTS, "depth", "finetune"), "parts-lost", "finetune-0"),
        ((PARTS, ("distill", {"student": {"layers": 1}})), "parts-lost", "depth-0"),
        ((GPTQ, "distill"), "codes-lost", "quantize-0"),
    ],
)
def test_work_that_is_lost_is_told_once(steps, code, maker):
    ((found, text),) = told(*steps)
    assert found == code
    assert f"'{maker}'" in text


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
