"""What a later step loses of an earlier one's work, as the stages themselves say it."""

import pytest

from smelt.pipeline.plan.step_draft import lost_results
from smelt.pipeline.recipe.stages import load_stage

pytestmark = pytest.mark.quick


def lost_results_of(*steps):
    """What is said of the steps of one branch, in order; each a word, or a word and its settings."""
    done = []
    for number, step in enumerate(steps):
        stage_name, settings = step if isinstance(step, tuple) else (step, {})
        stage = load_stage(stage_name)
        done.append((f"{stage_name}-{number}", stage, stage.settings_type.model_validate(settings)))
    return [
        lost_result
        for index, step in enumerate(done)
        for lost_result in lost_results(step, list(reversed(done[:index])), done[index + 1 :])
    ]


PATTERN = ("sparsify", {"pattern": "2:4"})
UNEVEN = ("prune", {"scope": "global"})
MASKS = ("finetune", {"learned_masks": {}})
NARROWER = ("finetune", {"learned_masks": {"targets": ["width"]}})
DIVIDED = ("share-weights", {"low_rank_delta": {"rank": 2}})
MOVED = ("finetune", {"sparsify": {}})
PARTS = ("drop-layers", {"targets": ["attention"]})
LEARNED_PARTS = ("finetune", {"learned_masks": {"targets": [], "parts": ["attention"]}})
GPTQ = ("quantize", {"scheme": "int4", "method": "gptq"})


@pytest.mark.parametrize(("steps", "code", "maker"), [
    ((PATTERN, "prune"), "pattern-lost", "sparsify-0"),
    ((PATTERN, "finetune", "prune"), "pattern-lost", "sparsify-0"),
    (("finetune", "drop-layers"), "training-lost", "finetune-0"),
    (("distill", "prune", "drop-layers"), "training-lost", "distill-0"),
    (("finetune", "distill", "drop-layers"), "training-lost", "distill-1"),
    (("shortlist", "trim-vocabulary"), "shortlist-lost", "shortlist-0"),
    (("prune", UNEVEN, "finetune", "share-weights"), "widths-lost", "prune-1"),
    ((MASKS, "share-weights"), "widths-lost", "finetune-0"), ((PATTERN, MASKS), "pattern-lost", "sparsify-0"),
    ((PATTERN, NARROWER), "pattern-lost", "sparsify-0"), (("sparsify", DIVIDED), "zeros-lost", "sparsify-0"),
    ((MOVED, DIVIDED), "zeros-lost", "finetune-0"),
    ((PARTS, "prune", "drop-layers"), "parts-lost", "drop-layers-0"),
    ((LEARNED_PARTS, "drop-layers", "finetune"), "parts-lost", "finetune-0"),
    ((PARTS, ("distill", {"student": {"layers": 1}})), "parts-lost", "drop-layers-0"),
    ((GPTQ, "distill"), "codes-lost", "quantize-0"),
])  # fmt: skip
def test_lost_work_is_reported_once(steps, code, maker):
    ((lost_code, text),) = lost_results_of(*steps)
    assert lost_code == code
    assert f"'{maker}'" in text


@pytest.mark.parametrize("steps", [
    (("sparsify", {"sparsity": 0.5}), "prune"), ("drop-layers", PARTS, "distill"),
    ("sparsify", "share-weights"), (DIVIDED, "sparsify"), ("sparsify", DIVIDED, "sparsify"), (PARTS, PARTS),
    ("prune", PATTERN), (PATTERN, "prune", PATTERN), ("finetune", "drop-layers", "finetune"),
    ("finetune", "drop-layers", "prune", "distill"), ("drop-layers", "finetune"),
    ("trim-vocabulary", "shortlist"), ("shortlist", "trim-vocabulary", "shortlist"),
    ("share-weights", UNEVEN), ("prune", "share-weights"), (NARROWER, "share-weights"), (MASKS, PATTERN),
    ("quantize", "finetune"), (GPTQ, ("finetune", {"lora": {}})),
])  # fmt: skip
def test_work_not_lost_or_redone_is_not_reported(steps):
    assert lost_results_of(*steps) == []
