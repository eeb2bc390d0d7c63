"""Select and remove attention and feed-forward parts of layers, by their importance.

The importance of a part is its influence on hidden states, or the loss without it. A part adds f(x) to the
states x, where f is an attention or a feed-forward part with the norm before it. With norms after the sum,
norm(x + f(x)), the norm is not part of f and is kept when f is removed.

Shapes: B = batch, S = tokens, D = width of the hidden states.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from smelt.calibration.samples import CalibrationSamples, load_calibration_samples, model_outputs
from smelt.compress.drop_layers.select_layers import (
    InfluenceSums,
    UnitId,
    ablation_losses,
    batches_on_device_one_by_one,
    drop_units_by_loss,
    max_trials,
    model_on_device,
    run_streamed,
)
from smelt.compress.drop_layers.settings import DropLayersSettings, check_parts, kept_fraction
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.data.splits import missing_labels_errors
from smelt.models.edits import Edit
from smelt.models.families.layout import Attention, FeedForward
from smelt.models.families.registry import Block, blocks_of, family_of, skipped_parts
from smelt.models.layers import skip_sublayer, sublayer_name
from smelt.models.streamed_model import StreamedModel
from smelt.stage import Context
from smelt.tasks.samples import TensorBatch


@dataclass(frozen=True)
class LayerPart:
    """A part of a block that is present.

    index: of the part in its block (see `skip_sublayer`). kind: its name in settings.
    """

    block: Block
    index: int
    kind: str

    @property
    def stack(self) -> str:
        """The name of the part's stack."""
        return self.block.stack.name

    @property
    def name(self) -> str:
        """The part's name in details: the block's index and the kind."""
        return f"{self.block.index} {self.kind}"

    @property
    def structure(self) -> Attention | FeedForward:
        """The names of the part's linear layers in the model."""
        stack = self.block.stack
        parts: tuple[Attention | FeedForward, ...] = (*stack.attentions, stack.feed_forward)
        return parts[self.index].with_prefix(self.block.module_path)

    @property
    def output(self) -> str:
        """The dotted name of the module whose output is added: the norm after the part, if it has one."""
        norms = self.block.stack.stream.output_norms
        if norms:
            return f"{self.block.module_path}.{norms[self.index]}"
        structure = self.structure
        return structure.out if isinstance(structure, Attention) else structure.output_module

    @property
    def norm(self) -> str:
        """The dotted name of the part's norm."""
        return f"{self.block.module_path}.{self.block.stack.stream.part_norms[self.index]}"


# Called with a part, x and f(x), float [B, S, D]; returns a replacement of f(x), or None.
PartCallback = Callable[[LayerPart, Tensor, Tensor], Tensor | None]


def layer_parts(model: Any) -> list[LayerPart]:
    """Return the present parts of all blocks of `model` in order; a repeated block counts once."""
    return [
        LayerPart(block, number, sublayer_name(block.stack, number))
        for block in blocks_of(model)
        for number in range(len(block.stack.attentions) + 1)
        if number not in skipped_parts(block.module)
    ]


def part_influence(
    model: Any, parts: Sequence[LayerPart], batches: Iterable[TensorBatch]
) -> dict[LayerPart, float]:
    """Return 1 - mean over tokens of cos(x, x + r f(x)) for each part, r = 1 or the family's factor.

    Source: He et al. 2024, What Matters in Transformers? Not All Attention is Needed, arXiv:2406.15786
    (their similarity, of attention and MLP layers with the norm and the residual that belong to them).

    Args:
        model: in eval mode.
        parts: the model's parts.
        batches: inputs without padding, on the device of the model.
    """
    with _influence_of_parts(model, parts) as sums:
        for _ in model_outputs(model, batches):
            pass
    return {part: sums.influence(part) for part in parts}


def streamed_part_influence(
    streamed: StreamedModel, parts: Sequence[LayerPart], samples: CalibrationSamples, ctx: Context
) -> dict[LayerPart, float]:
    """Return the same as `part_influence` for a model of which one block is in memory at a time."""
    with _influence_of_parts(streamed.model, parts) as sums:
        run_streamed(streamed, samples, ctx)
    return {part: sums.influence(part) for part in parts}


@contextmanager
def _influence_of_parts(model: Any, parts: Sequence[LayerPart]) -> Iterator[InfluenceSums[LayerPart]]:
    sums, family = InfluenceSums[LayerPart](), family_of(model)
    scale = 1.0 if family is None else family.residual_scale(model.config.to_dict())

    def see(part: LayerPart, x: Tensor, added: Tensor) -> None:
        channel_scales = part.block.stack.stream.part_scales
        scaled = scale * added.double()
        if channel_scales:
            scaled = scaled * model.get_parameter(f"{part.block.module_path}.{channel_scales[part.index]}")
        sums.add(part, x, x.double() + scaled)

    with _part_hooks(model, parts, see):
        yield sums


@contextmanager
def without_parts(model: Any, parts: Sequence[LayerPart], removed: Collection[LayerPart]) -> Iterator[None]:
    """Disable `removed`, some of the `parts` of `model`, inside the context."""

    def see(part: LayerPart, x: Tensor, added: Tensor) -> Tensor | None:
        return added.new_zeros(()) if part in removed else None

    with _part_hooks(model, parts, see):
        yield


@contextmanager
def _part_hooks(model: Any, parts: Sequence[LayerPart], callback: PartCallback) -> Iterator[None]:
    """Call `callback` for each part whenever it computes; a returned tensor replaces the part's output.

    Linear layers and norms may be shared by several blocks, and a norm by parallel parts: so the part is
    identified by the block that computes, and by the norm and the output, which computes after the norm
    (pre-norm) or right before it (post-norm).
    """
    state: dict[str, Any] = {}

    def enter(block: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            state["block"] = block

        return hook

    def begin(part: LayerPart) -> Callable[..., None]:
        def hook(_: Any, inputs: tuple[Any, ...]) -> None:
            if state["block"] == part.block.module_path:
                state[part.output] = part, inputs[0]

        return hook

    def end(names: Collection[str]) -> Callable[..., Any]:
        def hook(_: Any, inputs: Any, result: Any) -> Any:
            name = next((name for name in names if name in state), None)
            if name is None:
                return None
            part, x = state.pop(name)
            replacement = callback(part, x, result)
            return None if replacement is None else replacement.expand_as(result)

        return hook

    def keep(_: Any, inputs: Any, result: Any) -> None:
        state["added"] = result

    def summed(part: LayerPart) -> Callable[..., Any]:
        def hook(_: Any, inputs: tuple[Any, ...]) -> Any:
            if state["block"] != part.block.module_path:
                return None
            added = state.pop("added")
            x = inputs[0] - added
            replacement = callback(part, x, added)
            return None if replacement is None else (x + replacement, *inputs[1:])

        return hook

    handles = [block.module.register_forward_pre_hook(enter(block.module_path)) for block in blocks_of(model)]
    names: dict[Any, list[str]] = {}
    for part in parts:
        names.setdefault(model.get_submodule(part.output), []).append(part.output)
    pre_norm = {part.output: part.block.stack.stream.pre_norm for part in parts}
    for module, outputs in names.items():
        handles.append(module.register_forward_hook(end(outputs) if pre_norm[outputs[0]] else keep))
    for part in parts:
        make = begin if part.block.stack.stream.pre_norm else summed
        handles.append(model.get_submodule(part.norm).register_forward_pre_hook(make(part)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _PartRequest:
    """The parts of the stacks that the settings concern: those removed by index, and how many to keep.

    num_kept: of the stacks without explicit indices.
    """

    model: Any
    streamed: StreamedModel | None
    parts: list[LayerPart]
    stacks: Mapping[str, list[LayerPart]]
    named: list[LayerPart]
    num_kept: dict[str, int]

    @property
    def num_present(self) -> dict[str, int]:
        """The number of parts in the stacks of `num_kept`."""
        return {name: len(self.stacks[name]) for name in self.num_kept}

    def is_last(self, unit: UnitId, removed_units: Collection[UnitId]) -> bool:
        """Return whether the part is the last of its kind in its stack."""
        stack = self.stacks[unit[0]]
        same_kind = [index for index, part in enumerate(stack) if part.kind == stack[unit[1]].kind]
        return all((unit[0], index) in removed_units for index in same_kind if index != unit[1])


def drop_parts(
    model: Any,
    streamed: StreamedModel | None,
    edits: list[Edit],
    src: Artifact,
    settings: DropLayersSettings,
    ctx: Context,
) -> None:
    """Remove the least important parts of `model` in place; append the edits, report the details.

    One part of each kind is kept in each stack.

    streamed: the model, if one block of it is in memory at a time.

    Raises:
        InputError: parts that the model lacks, or settings that keep none of a kind.
    """
    if errors := check_parts(settings, model.config.to_dict()):
        raise InputError(
            "drop-layers: " + " ".join(f"{error.setting}: {error.message}" for error in errors),
            code=errors[0].code,
            messages=errors,
        )
    parts = layer_parts(model)
    stacks: dict[str, list[LayerPart]] = {}
    for part in parts:
        if part.kind in settings.parts:
            stacks.setdefault(part.stack, []).append(part)
    request = _PartRequest(model, streamed, parts, stacks, *_num_kept(settings, stacks, ctx))
    removed = {*request.named, *_select_parts(request, src, settings, ctx)}
    for part in (part for part in parts if part in removed):
        edits.append(skip_sublayer(model, part.block.module_path, part.index))
    ctx.details["dropped_parts"] = {
        name: [part.name for part in parts if part in removed] for name, parts in stacks.items()
    }


def _num_kept(
    settings: DropLayersSettings, stacks: Mapping[str, list[LayerPart]], ctx: Context
) -> tuple[list[LayerPart], dict[str, int]]:
    """Return the parts to remove by explicit index, and the number of parts to keep of other stacks."""
    removed: list[LayerPart] = []
    num_kept: dict[str, int] = {}
    for name, parts in stacks.items():
        choice = getattr(settings, name)
        kinds = len({part.kind for part in parts})
        if isinstance(choice, list):
            removed += [part for part in parts if part.block.index not in choice]
            continue
        count = math.floor(kept_fraction(settings) * len(parts) + 0.5) if choice is None else choice
        if count > len(parts):
            raise InputError(
                f"drop-layers: {name}: cannot keep {count} parts, because there are only"
                f" {len(parts)}. Lower the number.",
                code="more-than-model-has",
                setting=name,
            )
        if choice is not None and count < kinds:
            raise InputError(
                f"drop-layers: {name}: {count} is too few; one part of each kind must be kept, so at"
                f" least {kinds}.",
                code="too-few-kept",
                setting=name,
            )
        num_kept[name] = max(kinds, count)
        if num_kept[name] == len(parts) and choice is None and kept_fraction(settings) < 1:
            ctx.warn(
                "nothing-to-remove",
                f"keep_ratio {kept_fraction(settings):g} of the {len(parts)} {' and '.join(settings.parts)}"
                " of"
                f" {name}, rounded to at least one of each kind, keeps all of them; none is removed. Lower"
                " keep_ratio.",
            )
    remaining_kinds = {
        (part.stack, part.kind) for parts in stacks.values() for part in parts if part not in removed
    }
    for name, parts in stacks.items():
        for kind in {part.kind for part in parts}:
            if (name, kind) not in remaining_kinds:
                raise InputError(
                    f"drop-layers: {name}: {getattr(settings, name)} keeps no {kind}; keep at least one.",
                    code="no-part-left",
                    setting=name,
                )
    return removed, num_kept


def _select_parts(
    asked: _PartRequest, src: Artifact, settings: DropLayersSettings, ctx: Context
) -> list[LayerPart]:
    """Return the parts to remove in addition to those given by index."""
    model, stacks, num_kept, num_present = asked.model, asked.stacks, asked.num_kept, asked.num_present
    if num_kept == num_present:
        return []
    if settings.importance == "loss":
        return _select_by_loss(asked, src, settings, ctx)
    if settings.importance == "random":
        rng = random.Random(ctx.seed)
        scores = {name: [rng.random() for _ in stacks[name]] for name in num_kept}
    else:
        samples = load_calibration_samples(model, src, settings.calibration_samples, ctx, "drop-layers")
        if asked.streamed is not None:
            with without_parts(model, asked.parts, asked.named):
                influence = streamed_part_influence(asked.streamed, asked.parts, samples, ctx)
        else:
            with model_on_device(model, ctx) as device, without_parts(model, asked.parts, asked.named):
                influence = part_influence(
                    model, asked.parts, batches_on_device_one_by_one(samples.batches, device, ctx)
                )
        scores = {name: [round(influence[part], 6) for part in stacks[name]] for name in num_kept}
        ctx.details["part_influence"] = {
            name: dict(zip((part.name for part in stacks[name]), scores[name], strict=True))
            for name in num_kept
        }
    removed: list[UnitId] = []
    for name, count in num_kept.items():
        for index in sorted(range(num_present[name]), key=lambda index: scores[name][index]):
            if num_present[name] - sum(stack == name for stack, _ in removed) > count and not asked.is_last(
                (name, index), removed
            ):
                removed.append((name, index))
    return [stacks[name][index] for name, index in removed]


def _select_by_loss(
    asked: _PartRequest, src: Artifact, settings: DropLayersSettings, ctx: Context
) -> list[LayerPart]:
    """Remove one by one the part with the smallest loss without it; all stacks compete.

    Raises:
        InputError: there are no samples, or the pairs of a sentence embedder have no scores.
    """
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is not None and (errors := missing_labels_errors(ctx.task, {"rows": split}, ("rows",))):
        raise InputError(
            f"drop-layers: importance: loss: {errors[0].message} Or set importance: block-influence.",
            code=errors[0].code,
            setting="importance",
        )
    model, stacks = asked.model, asked.stacks
    batches = load_calibration_samples(
        model, src, settings.calibration_samples, ctx, "drop-layers", labels=True, padded=True
    ).batches

    def without(removed_units: Collection[UnitId]) -> AbstractContextManager[None]:
        return without_parts(
            model, asked.parts, {*asked.named, *(stacks[name][index] for name, index in removed_units)}
        )

    def layer_of(part: UnitId) -> UnitId:
        return part[0], stacks[part[0]][part[1]].block.index

    trial_limit = max_trials(asked.num_kept, asked.num_present)
    with ablation_losses(model, batches, without, ctx, trial_limit, layer_of) as loss_without:
        ctx.details["loss_before"] = round(loss_without(frozenset()), 6)
        removed, losses = drop_units_by_loss(
            asked.num_kept, asked.num_present, (), loss_without, asked.is_last
        )
    dropped = [stacks[name][index] for name, index in removed]
    ctx.details["dropped"] = [
        {"stack": part.stack, "layer": part.block.index, "part": part.kind, "loss": round(loss, 6)}
        for part, loss in zip(dropped, losses, strict=True)
    ]
    return dropped
