"""What each technique promises of a model, and what of that must still hold behind another one.

Looked at from outside: the folder that a stage left is read, and counted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paired_techniques import Technique

from smelt.core.artifact import Artifact
from smelt.core.messages import codes

NEAR = 1e-5  # between a model in memory and the same read from its folder, relative to its outputs
GAINS_NOTHING = {
    *("already-factorized", "already-shared", "minimum-kept", "more-kept-than-asked", "no-part-in-common"),
    *("no-rank-saves", "no-size-reduction", "nothing-to-remove", "nothing-to-trim", "single-layer-groups"),
    "shape-mismatch",  # of the layers that `share` leaves apart
}
"""What a stage says that leaves a model as it is."""
NO_ZEROS = {"factorize", "quantize"}
"""Stages that make other matrices of those that had zeros: the docstring of `sparsify` says so."""
CUTS = {"prune", "finetune"}
"""Stages that may take units away (`finetune` with masks)."""
NO_LAYERS = {"drop-layers", "distill"}
"""Stages that may leave so few layers that no two of them share."""
NO_VALUES = {"share-weights", "factorize"}
"""Stages of whose layers a plan says that the work is lost (or that leave too few to be counted)."""


@dataclass(frozen=True)
class Seen:
    """What is counted of the model in a folder.

    layers: by stack. units: heads and neurons by the name of their part. coded, thin, zeroed: fractions of
    the matrices of blocks that are codes, that are two thin ones, whose zeros last. zeros: the least fraction
    of zeros in one whose zeros last. mean_zeros: the mean of these fractions. patterned: whether two of each
    four are zero in all of them. distinct: different matrices of blocks, a fraction of their places. listed:
    whether a shortlist lies beside it.
    outputs: float32, of fixed inputs.
    """

    parameters: int
    bytes: int
    words: int | None
    layers: dict[str, int]
    units: dict[str, int]
    coded: float
    thin: float
    zeroed: float
    zeros: float
    mean_zeros: float
    patterned: bool
    distinct: float
    listed: bool
    outputs: Any


def outputs_of(model: Any) -> Any:
    """Return what a model of any kind makes of two fixed inputs; tokens beyond its vocabulary never come."""
    import torch

    draw = torch.Generator().manual_seed(0)
    config = model.config
    with torch.no_grad():
        if hasattr(config, "num_channels"):
            return model(torch.rand(2, config.num_channels, 16, 16, generator=draw)).logits
        ids = torch.randint(5, 18, (2, 9), generator=draw)
        more = {"decoder_input_ids": ids[:, :5]} if config.is_encoder_decoder else {}
        found = model(ids, **more)
    return found.logits if hasattr(found, "logits") else found.sentence_embedding


def look(folder: Path) -> Seen:
    """Read and count what lies in `folder`."""
    from smelt.families.registry import family_of
    from smelt.families.walk import blocks_of
    from smelt.runtime.generate.shortlist import read_shortlist
    from smelt.runtime.layers.adapted import AdaptedLinear
    from smelt.runtime.layers.low_rank import LowRankLinear
    from smelt.runtime.layers.quantized import is_quantized
    from smelt.runtime.layers.scaled import ScaledLinear
    from smelt.runtime.layers.shared import parts_of
    from smelt.runtime.layers.split import SplitLinear
    from smelt.runtime.models.checkpoint import load_model
    from smelt.runtime.models.places.parameters import count_parameters
    from smelt.runtime.models.stored_dtype import weight_bytes
    from smelt.runtime.models.structure import keeps_zeros

    model, _ = load_model(folder)
    config, blocks = model.config, blocks_of(model)
    units: dict[str, int] = {}
    places = []
    for block in blocks:
        for part in block.attentions:
            units[part.out] = int(model.get_submodule(part.out).in_features)
            places += part.products
        if (feed := block.feed_forward) is not None:  # else `depth` took it out
            units[feed.down] = int(model.get_submodule(feed.down).in_features)
            places += feed.products
    modules = [model.get_submodule(name) for name in places]
    whole = [matrix for module in modules for matrix in parts_of(module).values()]
    inside = [half for m in whole for half in ((m.first, m.second) if isinstance(m, SplitLinear) else (m,))]
    matrices = [m.linear if isinstance(m, ScaledLinear) else m for m in inside]
    held = [m for m in matrices if keeps_zeros(m)]
    zeroed = [m.matrix.dequantize() if is_quantized(m) else m.weight.detach() for m in held]
    empty = [float((w == 0).float().mean()) for w in zeroed]
    words = getattr(config, "vocab_size", None)
    if words is not None:
        assert _words_of_tokenizer(folder) <= words, "the tokenizer knows more words than the model"
    values = vars(config)
    return Seen(
        parameters=count_parameters(folder),
        bytes=weight_bytes(folder),
        words=words,
        layers={s.name: len(model.get_submodule(s.place)) for s in family_of(model).stacks(values)},
        units=units,
        coded=_part(matrices, lambda m: is_quantized(m) or isinstance(m, AdaptedLinear)),
        thin=_part(modules, lambda m: isinstance(m, LowRankLinear)),
        zeroed=_part(matrices, keeps_zeros),
        zeros=min(empty, default=0.0),
        mean_zeros=sum(empty) / max(1, len(empty)),
        patterned=bool(zeroed) and all(_two_of_four(w) for w in zeroed),
        distinct=len(set(map(id, matrices))) / max(1, len(matrices)),
        listed=config.is_encoder_decoder and read_shortlist(folder, config.to_dict()) is not None,
        outputs=outputs_of(model),
    )


_COUNTED: dict[str, int] = {}


def _words_of_tokenizer(folder: Path) -> int:
    """Return how many words the tokenizer in `folder` knows; files that were read before are not again."""
    from smelt.core.files import hash_of, sha256_of
    from smelt.runtime.models.checkpoint import load_tokenizer

    changing = {"config.json", "generation_config.json", "structure.json", "manifest.json", "vocabulary.json"}
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in changing]
    key = hash_of({path.name: sha256_of(path) for path in files if ".safetensors" not in path.name})
    if key not in _COUNTED:
        _COUNTED[key] = len(load_tokenizer(folder))
    return _COUNTED[key]


def _part(modules: list[Any], is_one: Any) -> float:
    return sum(map(bool, map(is_one, modules))) / max(1, len(modules))


def _two_of_four(weight: Any) -> bool:
    rows, columns = weight.shape
    groups = weight[:, : columns // 4 * 4].reshape(rows, -1, 4)
    return bool(((groups != 0).sum(-1) <= 2).all())


def check(technique: Technique, before: Seen, after: Seen, warned: Collection[str]) -> None:
    """Compare what a technique was given with what it left.

    warned: the codes of its warnings; a stage that gains nothing leaves a model alone and says so.
    """
    import torch

    assert torch.isfinite(after.outputs).all(), "it gives no numbers"
    word, settings = technique.word, technique.settings
    size = (after.bytes, before.bytes) if word == "quantize" else (after.parameters, before.parameters)
    fewer = sum(after.layers.values()) < sum(before.layers.values())
    empty = fewer and len(after.units) == len(before.units)  # what went had no parts any more
    thin = "student" in settings and 1 in before.layers.values()  # as it is to be
    shared = word == "drop-layers" and before.distinct < 1  # what goes may still be used elsewhere
    if technique.shrinks and GAINS_NOTHING.isdisjoint(warned):
        grown = size[0] > size[1] if thin or empty or shared else size[0] >= size[1]
        assert not grown, f"{size[1]:,} became {size[0]:,}"
    if word in ("finetune", "distill") and "learned_masks" not in settings and "student" not in settings:
        assert (after.layers, after.units) == (before.layers, before.units)
        # a student that is its teacher's equal has nothing to learn
        assert word == "distill" or not torch.equal(after.outputs, before.outputs), "nothing was learned"
    if word == "quantize":
        assert after.coded == 1 or not after.units
        assert not torch.equal(after.outputs, before.outputs)
    if word == "sparsify" or "sparsify" in settings:
        assert after.zeroed > 0
        assert after.zeros >= 0.45
        assert after.patterned or "pattern" not in settings
    if word == "shortlist":
        assert after.listed
        assert torch.equal(after.outputs, before.outputs)


def check_lasting(stage: str, before: Seen, after: Seen, lost: Collection[str]) -> None:
    """Hold what the model of an earlier step had against what a later one, of the word `stage`, left of it.

    lost: the codes of what the plan and the stage said; what they say is lost need not hold.
    """
    assert after.parameters <= before.parameters or stage in GROWS
    assert before.words is None or after.words <= before.words
    assert all(after.layers[name] <= count for name, count in before.layers.items())
    # the layers that stay move up, so that a part may have another one's name
    assert sum(after.units.values()) <= sum(before.units.values())
    assert max(after.units.values(), default=0) <= max(before.units.values(), default=0)
    assert after.coded >= before.coded, "codes are gone"
    assert after.listed >= before.listed, "the shortlist is gone"
    if stage not in NO_ZEROS and "zeros-lost" not in lost:
        assert after.zeroed >= before.zeroed, "zeros may be filled from now on"
        # units that go may be those with most zeros, which one matrix feels more than all of them together:
        # half of phi3's channels leave it a fifth of them
        assert after.zeros >= before.zeros * (0.1 if stage in CUTS else 0.99), "zeros are gone"
        assert after.mean_zeros >= before.mean_zeros * (0.5 if stage in CUTS else 0.99), "zeros are gone"
        assert after.patterned >= before.patterned or not {"pattern-lost", "pattern-does-not-fit"}.isdisjoint(
            lost
        )
    if stage not in NO_LAYERS:
        assert after.distinct <= before.distinct, "layers that were shared are apart"
        assert after.thin >= before.thin or stage == "share-weights"


GROWS = {"quantize", "finetune", "distill", "prune"}
"""Stages behind which there may be more numbers: scales, adapters, and of T5 a bias by distance a layer."""


def promises(
    technique: Technique, parent: Artifact, made: Artifact, seen: dict[str, Seen], planned: list[str]
) -> None:
    """Check what `technique` made of `parent`.

    seen: by key, what was counted before; filled. planned: the codes of what the plan said of the step.
    """
    for artifact in (parent, made):
        if artifact.key not in seen:
            seen[artifact.key] = look(artifact.path)
    before, after = seen[parent.key], seen[made.key]
    warned = codes(made.manifest.warnings)
    check(technique, before, after, warned)
    check_lasting(technique.word, before, after, [*warned, *planned])
