"""What each technique promises of a model, and what of that must still hold behind another one.

Looked at from outside: the folder that a stage left is read, and counted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact
from smelt.core.messages import message_codes
from tests.support.pairs.paired_techniques import Technique

OUTPUT_TOLERANCE = (
    1e-5  # between a model in memory and the same read from its folder, relative to its outputs
)
NO_CHANGE_CODES = {
    *("already-factorized", "already-shared", "minimum-kept", "more-kept-than-asked", "no-part-in-common"),
    *("no-rank-saves", "no-size-reduction", "nothing-to-remove", "nothing-to-trim", "single-layer-groups"),
    "shape-mismatch",  # of the layers that `share` leaves apart
}
"""What a stage says that leaves a model as it is."""
ZERO_REMOVING_STAGES = {"factorize", "quantize"}
"""Stages that make other matrices of those that had zeros: the docstring of `sparsify` says so."""
UNIT_REMOVING_STAGES = {"prune", "finetune"}
"""Stages that may take units away (`finetune` with masks)."""
LAYER_REMOVING_STAGES = {"drop-layers", "distill"}
"""Stages that may leave so few layers that no two of them share."""


@dataclass(frozen=True)
class ModelCounts:
    """Counts of the model in a folder.

    layers: by stack. units: heads and neurons by module name. quantized_fraction, low_rank_fraction,
    sparse_fraction: fractions of the blocks' matrices that are quantized, low-rank, and sparse at the end.
    min_sparsity, mean_sparsity: fraction of zeros over the sparse matrices. is_two_of_four: whether all of
    them are 2:4 sparse. distinct_fraction: different matrices in the blocks, a fraction of their places.
    has_shortlist: whether a shortlist is stored with the model. outputs: float32, for fixed inputs.
    """

    parameters: int
    bytes: int
    vocabulary_size: int | None
    layers: dict[str, int]
    units: dict[str, int]
    quantized_fraction: float
    low_rank_fraction: float
    sparse_fraction: float
    min_sparsity: float
    mean_sparsity: float
    is_two_of_four: bool
    distinct_fraction: float
    has_shortlist: bool
    outputs: Any


def outputs_of(model: Any) -> Any:
    """Return what a model of any kind makes of two fixed inputs; tokens beyond its vocabulary never come."""
    import torch

    from smelt.models.families.registry import reads_images_and_texts
    from smelt.models.image_text_model import image_embeds, text_embeds
    from smelt.models.sentence_model import head_output

    draw = torch.Generator().manual_seed(0)
    config = model.config
    with torch.no_grad():
        if hasattr(config, "num_channels"):
            return model(torch.rand(2, config.num_channels, 16, 16, generator=draw)).logits
        if reads_images_and_texts(config.to_dict()):
            size = config.vision_config.image_size
            images, ids = (
                torch.rand(2, 3, size, size, generator=draw),
                torch.randint(4, 14, (2, 12), generator=draw),
            )
            return torch.cat([image_embeds(model, images), text_embeds(model, ids)])
        ids = torch.randint(5, 18, (2, 9), generator=draw)
        decoder_inputs = {"decoder_input_ids": ids[:, :5]} if config.is_encoder_decoder else {}
        if hasattr(config, "num_mel_bins"):
            frames = torch.rand(2, config.num_mel_bins, 2 * config.max_source_positions, generator=draw)
            return model(frames, **decoder_inputs).logits
        outputs = model(ids, **decoder_inputs)
    return head_output(outputs)


def count_model(folder: Path) -> ModelCounts:
    """Read and count what lies in `folder`."""
    from smelt.generation.config import read_shortlist
    from smelt.models.checkpoint import load_model
    from smelt.models.edits import is_masked
    from smelt.models.families.registry import blocks_of, family_of
    from smelt.models.layers import LowRankCorrectedLinear, LowRankLinear, ScaledLinear, component_layers
    from smelt.models.model_size import count_parameters
    from smelt.models.weight_files import weight_files_size
    from smelt.quantization.layers import SplitLinear, is_quantized

    model, _ = load_model(folder)
    config, blocks = model.config, blocks_of(model)
    units: dict[str, int] = {}
    block_units = []
    for block in blocks:
        for attention in block.attentions:
            units[attention.out] = int(model.get_submodule(attention.out).in_features)
            block_units += attention.linear_layers
        for feed in block.feed_forwards:  # none if `depth` took it out
            units[feed.down] = int(model.get_submodule(feed.down).in_features)
            block_units += feed.linear_layers
    modules = [model.get_submodule(name) for name in block_units]
    weights = [matrix for module in modules for matrix in component_layers(module).values()]
    inside = [half for m in weights for half in ((m.first, m.second) if isinstance(m, SplitLinear) else (m,))]
    matrices = [m.linear if isinstance(m, ScaledLinear) else m for m in inside]
    masked = [m for m in matrices if is_masked(m)]
    zeroed = [m.matrix.dequantize() if is_quantized(m) else m.weight.detach() for m in masked]
    empty = [float((w == 0).float().mean()) for w in zeroed]
    vocab_size = getattr(config, "vocab_size", None)
    if vocab_size is not None:
        assert _tokenizer_size(folder) <= vocab_size, "the tokenizer knows more words than the model"
    values = vars(config)
    return ModelCounts(
        parameters=count_parameters(folder),
        bytes=weight_files_size(folder),
        vocabulary_size=vocab_size,
        layers={s.name: len(model.get_submodule(s.module_path)) for s in family_of(model).stacks(values)},
        units=units,
        quantized_fraction=_fraction(
            matrices, lambda m: is_quantized(m) or isinstance(m, LowRankCorrectedLinear)
        ),
        low_rank_fraction=_fraction(modules, lambda m: isinstance(m, LowRankLinear)),
        sparse_fraction=_fraction(matrices, is_masked),
        min_sparsity=min(empty, default=0.0),
        mean_sparsity=sum(empty) / max(1, len(empty)),
        is_two_of_four=bool(zeroed) and all(_two_of_four(w) for w in zeroed),
        distinct_fraction=len(set(map(id, matrices))) / max(1, len(matrices)),
        has_shortlist=config.is_encoder_decoder and read_shortlist(folder, config.to_dict()) is not None,
        outputs=outputs_of(model),
    )


_TOKENIZER_SIZES: dict[str, int] = {}


def _tokenizer_size(folder: Path) -> int:
    """Return how many words the tokenizer in `folder` knows; files that were read before are not again."""
    from smelt.core.files import json_hash, sha256_of
    from smelt.models.checkpoint import load_tokenizer

    changing = {"config.json", "generation_config.json", "structure.json", "manifest.json", "vocabulary.json"}
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in changing]
    key = json_hash({path.name: sha256_of(path) for path in files if ".safetensors" not in path.name})
    if key not in _TOKENIZER_SIZES:
        _TOKENIZER_SIZES[key] = len(load_tokenizer(folder))
    return _TOKENIZER_SIZES[key]


def _fraction(modules: list[Any], is_one: Any) -> float:
    return sum(map(bool, map(is_one, modules))) / max(1, len(modules))


def _two_of_four(weight: Any) -> bool:
    rows, columns = weight.shape
    groups = weight[:, : columns // 4 * 4].reshape(rows, -1, 4)
    return bool(((groups != 0).sum(-1) <= 2).all())


def check_technique(
    technique: Technique, before: ModelCounts, after: ModelCounts, warned: Collection[str]
) -> None:
    """Compare what a technique was given with what it left.

    warned: the codes of its warnings; a stage that gains nothing leaves a model alone and says so.
    """
    import torch

    assert torch.isfinite(after.outputs).all(), "it gives no numbers"
    stage_name, settings = technique.stage, technique.settings
    size = (after.bytes, before.bytes) if stage_name == "quantize" else (after.parameters, before.parameters)
    fewer = sum(after.layers.values()) < sum(before.layers.values())
    empty = fewer and len(after.units) == len(before.units)  # what went had no parts any more
    thin = "student" in settings and 1 in before.layers.values()  # as it is to be
    shared = (
        stage_name == "drop-layers" or "student" in settings
    ) and before.distinct_fraction < 1  # what goes may still be used elsewhere
    if technique.shrinks and NO_CHANGE_CODES.isdisjoint(warned):
        grown = size[0] > size[1] if thin or empty or shared else size[0] >= size[1]
        assert not grown, f"{size[1]:,} became {size[0]:,}"
    if (
        stage_name in ("finetune", "distill")
        and "learned_masks" not in settings
        and "student" not in settings
    ):
        assert (after.layers, after.units) == (before.layers, before.units)
        # a student that is its teacher's equal has nothing to learn
        assert stage_name == "distill" or not torch.equal(after.outputs, before.outputs), (
            "nothing was learned"
        )
    if stage_name == "quantize":
        assert after.quantized_fraction == 1 or not after.units
        assert not torch.equal(after.outputs, before.outputs)
    if stage_name == "sparsify" or "sparsify" in settings:
        assert after.sparse_fraction > 0
        assert after.min_sparsity >= 0.45
        assert after.is_two_of_four or "pattern" not in settings
    if stage_name == "shortlist":
        assert after.has_shortlist
        assert torch.equal(after.outputs, before.outputs)


def check_preserved(stage: str, before: ModelCounts, after: ModelCounts, lost: Collection[str]) -> None:
    """Hold what the model of an earlier step had against what a later one, of the word `stage`, left of it.

    lost: the codes of what the plan and the stage said; what they say is lost need not hold.
    """
    assert after.parameters <= before.parameters or stage in PARAMETER_ADDING_STAGES
    assert before.vocabulary_size is None or after.vocabulary_size <= before.vocabulary_size
    assert all(after.layers[name] <= count for name, count in before.layers.items())
    # the layers that stay move up, so that a part may have another one's name
    assert sum(after.units.values()) <= sum(before.units.values())
    assert max(after.units.values(), default=0) <= max(before.units.values(), default=0)
    assert after.quantized_fraction >= before.quantized_fraction, "codes are gone"
    assert after.has_shortlist >= before.has_shortlist, "the shortlist is gone"
    if stage not in ZERO_REMOVING_STAGES and "zeros-lost" not in lost:
        assert after.sparse_fraction >= before.sparse_fraction, "zeros may be filled from now on"
        # units that go may be those with most zeros, which one matrix feels more than all of them together:
        # half of phi3's channels leave it a fifth of them
        assert after.min_sparsity >= before.min_sparsity * (0.1 if stage in UNIT_REMOVING_STAGES else 0.99), (
            "zeros are gone"
        )
        assert after.mean_sparsity >= before.mean_sparsity * (
            0.5 if stage in UNIT_REMOVING_STAGES else 0.99
        ), "zeros are gone"
        assert after.is_two_of_four >= before.is_two_of_four or not {
            "pattern-lost",
            "pattern-does-not-fit",
        }.isdisjoint(lost)
    if stage not in LAYER_REMOVING_STAGES:
        assert after.distinct_fraction <= before.distinct_fraction, "layers that were shared are apart"
        assert after.low_rank_fraction >= before.low_rank_fraction or stage == "share-weights"


PARAMETER_ADDING_STAGES = {"quantize", "finetune", "distill", "prune", "rotate"}
"""Stages behind which there may be more numbers: scales, adapters, of T5 a bias by distance a layer, and an
output layer that was tied."""


def check_result(
    technique: Technique, parent: Artifact, result: Artifact, seen: dict[str, ModelCounts], planned: list[str]
) -> None:
    """Check what `technique` made of `parent`.

    seen: by key, what was counted before; filled. planned: the codes of what the plan said of the step.
    """
    for artifact in (parent, result):
        if artifact.key not in seen:
            seen[artifact.key] = count_model(artifact.path)
    before, after = seen[parent.key], seen[result.key]
    warned = message_codes(result.manifest.warnings)
    check_technique(technique, before, after, warned)
    check_preserved(technique.stage, before, after, [*warned, *planned])
