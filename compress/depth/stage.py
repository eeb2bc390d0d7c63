"""DropLayers pruning: whole layers go, those without which the model computes nearly the same."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.depth.fit import STACKS, check_depth, fraction_kept, layers_kept
from smelt.compress.depth.settings import LAYERS_BEHIND_PARTS, DropLayersSettings, Layers
from smelt.compress.train.run import scores_lacking
from smelt.core.artifact import Artifact, Format
from smelt.core.data import TASKS, Split, Task
from smelt.core.errors import InputError
from smelt.core.messages import Message, mistake, warning
from smelt.core.stage import Context, Need
from smelt.families.registry import FAMILIES, family_of

if TYPE_CHECKING:
    from smelt.families.family import Stack

_LOOKS = ("block-influence", "loss")


class DropLayers:
    """Remove whole layers, or parts of layers, those without which the model computes nearly the same.

    Saves time and bytes in proportion: a layer that is gone is neither computed nor stored, and the
    Hugging Face config says how many are left. `loss` drops one after another the layer without which the
    loss on calibration rows is smallest, which costs a pass over the rows for each that is tried, from that
    layer on. `block-influence` costs one pass in all: 1 - mean cos(states in, states out) of a layer, made
    for deep models whose norms come first. A decoder's layer saves time in every step of generation, an
    encoder's once a text. With `targets` attentions or feed-forward parts go alone, and of such a part
    nothing but the residual stays. Quality falls at once; follow with distill (or finetune).

        - drop-layers: {keep_ratio: 0.5}
        - drop-layers: {decoder_layers: 1, importance: block-influence}
        - drop-layers: {targets: [attention, ffn], keep_ratio: 0.75}
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "drop-layers"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset({"train", "calibration"})
    source: ClassVar[str] = (
        "block influence: ShortGPT, Men et al. 2024, arXiv:2403.03853; of parts: He et al. 2024,"
        " arXiv:2406.15786; uniform, first, last: Shleifer & Rush 2020, arXiv:2010.13002, Sajjad et al."
        " 2020, arXiv:2004.03844"
    )
    version: ClassVar[int] = 1
    settings_type: ClassVar[type[DropLayersSettings]] = DropLayersSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def leaves(cls, settings: DropLayersSettings) -> frozenset[str]:
        """Return what later steps may lose: layers that have all their parts."""
        return frozenset({"parts"} if settings.parts else ())

    @classmethod
    def spoils(cls, settings: DropLayersSettings) -> Mapping[str, str]:
        """Return what is lost of the work of steps before it: what the layers that go have learned."""
        found = {
            "training": "layers that go take part of what '{step}' trained with them, and nothing trains"
            " afterwards; put a finetune or distill behind it"
        }
        return found if settings.parts else found | {"parts": LAYERS_BEHIND_PARTS}

    @classmethod
    def needs_with(cls, settings: DropLayersSettings, given: Collection[str]) -> frozenset[Need]:
        """Return what it needs: two kinds of importance look at rows, for calibration if there are any."""
        if settings.importance not in _LOOKS:
            return frozenset()
        return frozenset({"calibration"} if "calibration" in given else {"train"})

    @classmethod
    def check_rows(cls, settings: DropLayersSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
        """Return what does not fit the rows: the loss of a sentence embedder is made of scores."""
        found = scores_lacking(task, data, ("calibration",) if "calibration" in data else ("train",))
        looks = settings.importance == "loss"
        return (
            [
                mistake(one.code, f"{one.message} Or take block-influence.", setting="importance")
                for one in found
            ]
            if looks
            else []
        )

    @classmethod
    def check_model(
        cls, settings: DropLayersSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return what does not fit a model of this config, by setting, and the config of the result."""
        return check_depth(settings, config)

    def __call__(self, src: Artifact, settings: DropLayersSettings, ctx: Context) -> None:
        """Choose the layers of `src` that go, drop them, and write the model to `ctx.out`."""
        from smelt.compress.distill.student import keep_layers
        from smelt.compress.train.state import threads
        from smelt.runtime.models.checkpoint import load_model, save_model
        from smelt.runtime.models.places.parameters import count_parameters

        with threads(ctx.threads):
            model, edits = load_model(src.path)
            stacks = _stacks(model, settings)
            if settings.parts:
                from smelt.compress.depth.drop_parts import drop_parts

                drop_parts(model, edits, src, settings, ctx)
            else:
                kept = _choose(model, stacks, src, settings, ctx)
                for stack in stacks:
                    edits, _ = keep_layers(model, edits, stack.name, kept[stack.name], "first")
                ctx.details["kept_layers"] = kept
            ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))
            ctx.details["parameters_before"] = count_parameters(src.path)
            ctx.details["parameters_after"] = count_parameters(ctx.out)


def _stacks(model: Any, settings: DropLayersSettings) -> list[Stack]:
    """Return the stacks of `model`.

    Raises:
        InputError: a family that smelt does not know, or layers that it does not have.
    """
    family, config = family_of(model), model.config.to_dict()
    if family is None:
        raise InputError(
            f"drop-layers: the layers of a {model.config.model_type} model are not known."
            f" Known: {', '.join(FAMILIES)}.",
            code="unsupported-family",
        )
    mistakes, _ = check_depth(settings, config)
    if mistakes:
        raise InputError(
            "drop-layers: " + " ".join(f"{one.setting or ''}: {one.message}" for one in mistakes),
            code=mistakes[0].code,
            found=mistakes,
        )
    return list(family.stacks(config))


def _choose(
    model: Any, stacks: list[Stack], src: Artifact, settings: DropLayersSettings, ctx: Context
) -> dict[str, list[int]]:
    """Return by stack the numbers of the layers that stay; tell the details what decided."""
    from smelt.compress.depth.choose import by_influence, by_loss

    there = {stack.name: len(model.get_submodule(stack.place)) for stack in stacks}
    wanted = layers_kept(settings, there)
    ctx.warnings.extend(_nothing_goes(wanted, there, settings))
    kept = {name: choice for name, choice in wanted.items() if isinstance(choice, list)}
    kept |= {name: list(range(count)) for name, count in there.items() if wanted[name] == count}
    numbers = {name: c for name, c in wanted.items() if isinstance(c, int) and name not in kept}
    if not numbers:
        return kept
    if settings.importance in _LOOKS:
        if settings.importance == "loss":
            found = by_loss(model, stacks, kept, numbers, src, settings, ctx)
        else:
            found = by_influence(model, stacks, numbers, src, settings, ctx)
        ctx.warnings.extend(
            warning(
                "minimum-kept",
                f"{name}: {len(found[name])} layers are kept instead of {count}: an earlier step removed"
                " parts of layers, and one of each kind must be kept. Remove layers before their parts.",
            )
            for name, count in numbers.items()
            if len(found[name]) > count
        )
        return kept | found
    return kept | {name: _by_place(count, there[name], settings, ctx) for name, count in numbers.items()}


def _nothing_goes(
    wanted: dict[str, Layers], there: dict[str, int], settings: DropLayersSettings
) -> list[Message]:
    """Say where `keep_ratio` is below 1 and yet all layers stay."""
    keep = fraction_kept(settings)
    told = [name for name in STACKS if getattr(settings, name) is not None]
    whole = [name for name, choice in wanted.items() if choice == there[name] and name not in told]
    if keep == 1:
        return []
    return [
        warning(
            "nothing-to-remove",
            f"keep_ratio {keep:g} of the {there[name]} {name}, rounded to at least one, keeps all of them;"
            f" none is"
            " removed. Lower keep_ratio.",
            setting="keep_ratio",
        )
        for name in whole
    ]


def _by_place(count: int, there: int, settings: DropLayersSettings, ctx: Context) -> list[int]:
    from smelt.compress.distill.student import layers_to_copy

    if settings.importance == "random":
        return sorted(random.Random(ctx.seed).sample(range(there), count))
    return layers_to_copy(count, there, settings.importance)
