"""Which pairs of techniques there are on which models, by what stages say of themselves; few and all.

What is left out here is what the plan refuses: `run_all_pairs.py` asks it of all.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from zlib import crc32

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.pipeline.recipe.stages import load_stage
from smelt.quantization.scheme import Scheme
from smelt.quantization.schemes.registry import SCHEMES
from smelt.stage import QuantizedInput, Settings
from tests.support.models import every_family, image_text
from tests.support.pairs.paired_techniques import MODELS, TECHNIQUES, Technique, TinyModel

PairCase = tuple[str, str, str]
"""A model, what goes first, and what follows it."""


def is_applicable(model: TinyModel, technique: Technique) -> bool:
    """Say whether a technique can do something with a model, by task and config."""
    stage, settings = load_stage(technique.stage), _settings(technique, model)
    if technique.applied_after and not is_applicable(model, TECHNIQUES[technique.applied_after]):
        return False
    if model.task not in stage.tasks:
        return False
    masks = technique.settings.get("learned_masks", {})
    targets = {*technique.settings.get("targets", ()), *masks.get("targets", ())}
    if model.task in ("sentence-similarity", image_text.TASK) and "width" in targets:
        return False  # its vectors are what the width is of, or its towers have two widths
    config = {"model_type": model.kind, **every_family.CONFIGS.get(model.kind, {})}
    return not stage.check_model(settings, config)[0]


def can_follow(first: Technique, second: Technique) -> bool:
    """Say whether `second` can go on from what `first` leaves.

    What changes float weights needs some, what says how codes train needs those, and what takes units away
    needs layers that do not hold theirs. Adapters cannot be combined with halves of layers.
    """
    stage, next_stage = load_stage(first.stage), load_stage(second.stage)
    settings = stage.settings_type.model_validate(dict(first.settings))
    next_settings = next_stage.settings_type.model_validate(dict(second.settings))
    if stage.unit_pruning_error(settings) and (next_stage.prunes_units or "learned_masks" in second.settings):
        return False
    schemes = _schemes_after(first)
    if (codes := second.settings.get("qat")) is not None:
        if codes.get("weight_splitting"):
            return bool(schemes) and bool(schemes[0].split_scheme) and not _splits_weights(first)
        return any(scheme.learnable_scales for scheme in schemes)
    if schemes and (next_stage.needs_float or {"learned_masks", "sparsify"} & second.settings.keys()):
        return False
    if schemes and next_stage.quantized_input_error(next_settings, _quantization_before(first, schemes)):
        return False
    return not (_splits_weights(first) and "lora" in second.settings)


def all_pairs() -> list[PairCase]:
    """Return all pairs that the plan takes, model by model."""
    behind = {
        name: [other for other, second in TECHNIQUES.items() if can_follow(first, second)]
        for name, first in TECHNIQUES.items()
    }
    pairs = []
    for name, model in MODELS.items():
        possible = [
            name_of_technique
            for name_of_technique, technique in TECHNIQUES.items()
            if is_applicable(model, technique)
        ]
        pairs += [(name, a, b) for a in possible for b in behind[a] if b in possible]
    return pairs


# Whether the second is possible depends on which part the first removes: a student of one layer needs it.
_DECIDED_BY_LOSS = {("depth-parts", "student")}


def covering_pairs() -> list[PairCase]:
    """Return few pairs: each technique is once first and once second, each family is in one.

    Each stage meets each task, and each family that computes in a way of its own.

    One after the other that pair is taken which has most of what no other has; of equals the first in an
    order that nobody chose.
    """
    cells = [cell for cell in all_pairs() if cell[1:] not in _DECIDED_BY_LOSS]
    cells = sorted(cells, key=lambda cell: crc32(" ".join(cell).encode()))
    bit_positions: dict[tuple[str, str], int] = {}
    bits = {}
    for cell in cells:
        name, first, second = cell
        model, stage_names = MODELS[name], {TECHNIQUES[first].stage, TECHNIQUES[second].stage}
        kinds = (model.task,) if every_family.MODELS[model.kind].like else (model.kind, model.task)
        met = {(kind, stage_name) for kind in kinds for stage_name in stage_names}
        met |= {("first", first), ("second", second), ("family", model.kind)}
        bits[cell] = sum(
            1 << bit_positions.setdefault(requirement, len(bit_positions)) for requirement in met
        )
    missing, pairs = (1 << len(bit_positions)) - 1, []
    # A count only falls: one that is still right when it is the largest of the heap is the largest.
    heap = [(-bits[cell].bit_count(), index) for index, cell in enumerate(cells)]
    heapq.heapify(heap)
    while missing:
        count, index = heap[0]
        added = bits[cells[index]] & missing
        if -count == added.bit_count():
            pairs.append(cells[index])
            missing &= ~added
        heapq.heapreplace(heap, (-(bits[cells[index]] & missing).bit_count(), index))
    return sorted(pairs)


def is_exported(cell: PairCase, part: int) -> bool:
    """Say whether the graph of a pair is looked at too: of one in `part`."""
    return crc32(" ".join(("graph", *cell)).encode()) % part == 0


def impossible_pairs() -> Iterator[tuple[str, str]]:
    """Yield the pairs that no model makes possible: the plan says so of each."""
    for first in TECHNIQUES:
        for second in TECHNIQUES:
            if not can_follow(TECHNIQUES[first], TECHNIQUES[second]):
                yield first, second


def _schemes_after(technique: Technique) -> list[Scheme]:
    """Return the schemes of the codes that a technique leaves, that of the linear layers first."""
    applied = TECHNIQUES[technique.applied_after] if technique.applied_after else technique
    if applied.stage != "quantize":
        return []
    settings = QuantizeSettings.model_validate(dict(applied.settings))
    return [SCHEMES[name] for name in settings.used_schemes()]


def _quantization_before(first: Technique, schemes: list[Scheme]) -> QuantizedInput:
    """Return the codes of the linear layers behind a technique, as stages ask for them."""
    applied = TECHNIQUES[first.applied_after] if first.applied_after else first
    mixed = "mixed_precision" in applied.settings
    codes = first.settings.get("qat", {})
    halved = [SCHEMES[schemes[0].split_scheme]] if codes.get("weight_splitting") else schemes[:1]
    return QuantizedInput(
        tuple(scheme.name for scheme in (schemes if mixed else halved)),
        has_corrections="low_rank_correction" in applied.settings or "lora" in first.settings,
        is_split=bool(codes.get("weight_splitting")),
    )


def _splits_weights(technique: Technique) -> bool:
    return bool(technique.settings.get("qat", {}).get("weight_splitting"))


def _settings(technique: Technique, model: TinyModel) -> Settings:
    return load_stage(technique.stage).settings_type.model_validate(technique.settings_for(model))
