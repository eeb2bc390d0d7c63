"""Sharing: neighbouring layers of a stack multiply with the same matrices, which are stored once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.float_model import load_float, stored_parameters
from smelt.compress.share.settings import ShareWeightsSettings
from smelt.core.artifact import Artifact, Format
from smelt.core.data import TASKS, Task
from smelt.core.errors import InputError
from smelt.core.messages import Message, mistake, warning
from smelt.core.stage import Context, Need
from smelt.core.text import article
from smelt.families.registry import FAMILIES, blockless, family_of

if TYPE_CHECKING:
    from torch import nn

    from smelt.families.walk import Block
    from smelt.runtime.models.structure import Edit

_DEFAULT_EVERY = 2


class ShareWeights:
    """Let neighbouring layers share the weights of their linear layers; norms stay each layer's own.

    Saves bytes and not time: as many layers are computed as before. Shared weights are stored once, in
    files and in graphs, and trained, pruned, factorized and quantized as the one thing that they are.
    Layers of a trained model are not interchangeable, so quality falls by much at once; follow with
    distill (or finetune). With low_rank_delta each layer adds a low-rank matrix and a bias of its own to
    the shared weights, by singular value decomposition; training then trains both.

        - share-weights: {targets: [ffn], exclude_first_and_last: true}
        - share-weights: {init_from: mean, low_rank_delta: {rank: 16}}
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "share-weights"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset()
    source: ClassVar[str] = (
        "neighbouring layers: Takase & Kiyono 2021, arXiv:2104.06022 (SEQUENCE); ends kept: Subformer, Reid"
        " et al. 2021, arXiv:2101.00234; attention or feed-forward: ALBERT, Lan et al. 2020,"
        " arXiv:1909.11942; low_rank_delta: Relaxed Recursive Transformers, Bae et al. 2024, arXiv:2410.20672"
    )
    version: ClassVar[int] = 1
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[ShareWeightsSettings]] = ShareWeightsSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def spoils(cls, settings: ShareWeightsSettings) -> Mapping[str, str]:
        """Return what of the steps before it is in its way, or lost.

        Layers of different sizes are not shared; what stands for layers with zeros has none.
        """
        zeros = {
            "zeros": "what layers share beside their differences is dense, and so are these: the zeros of"
            " '{step}' are lost; share before '{step}'"
        }
        return (zeros if settings.low_rank_delta is not None else {}) | {
            "widths": "'{step}' leaves layers of different sizes, which stay apart; share before '{step}',"
            " which then cuts those that are shared as one"
        }

    @classmethod
    def holds_units(cls, settings: ShareWeightsSettings) -> str | None:
        """Return why no head and no neuron can be cut from what it leaves; None where it can."""
        if settings.low_rank_delta is None:
            return None
        return "its layers share a matrix beside their differences, so that what goes from one goes from all"

    @classmethod
    def check_model(
        cls, settings: ShareWeightsSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return what does not fit a model of this config, by setting, and the config of the result."""
        family = FAMILIES.get(str(config.get("model_type")))
        if (lack := blockless(config)) is not None:
            return [mistake("does-not-fit-model", f"{lack}, which it puts together.")], config
        known = [stack.name for stack in family.stacks(config)] if family else []
        found = [
            mistake(
                "unknown-stack",
                f"{article(config.get('model_type'))} model has {' and '.join(known)}, not '{name}'",
                setting="stacks",
            )
            for name in settings.stacks or ()
            if known and name not in known
        ]
        return found, config

    def __call__(self, src: Artifact, settings: ShareWeightsSettings, ctx: Context) -> None:
        """Share weights among the layers of `src` and write the model to `ctx.out`."""
        from smelt.compress.train.state import threads
        from smelt.runtime.models.checkpoint import save_model

        with threads(ctx.threads):
            model, edits = load_float(src, self.name)
            ctx.details["parameters_before"] = stored_parameters(model)
            lost: dict[str, float] = {}
            shared, apart = share_layers(model, edits, settings, lost)
            ctx.details["parameters_after"] = stored_parameters(model)
            if settings.low_rank_delta is not None:
                ctx.details["lost"] = lost
            ctx.details["groups"] = shared
            ctx.warnings.extend(apart)
            ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))


def share_layers(
    model: Any, edits: list[Edit], settings: ShareWeightsSettings, lost: dict[str, float] | None = None
) -> tuple[dict[str, list[list[int]]], list[Message]]:
    """Share weights among the layers of `model` in place; append what changed to `edits`.

    lost: is told, by the first name of each product, what part of the squared distances from the mean of a
    group the differences do not hold.

    Returns:
        By stack the numbers of the layers that were put together, and what the user should know: layers
        that stay apart, and why.

    Raises:
        InputError: a family that smelt does not know, or none of the stacks that the settings name.
    """
    from smelt.families.walk import blocks_of

    if family_of(model) is None:
        raise InputError(
            f"share-weights: the layers of {article(model.config.model_type)} model are not known."
            f" Known: {', '.join(FAMILIES)}.",
            code="unsupported-family",
        )
    mistakes, _ = ShareWeights.check_model(settings, model.config.to_dict())
    if mistakes:
        raise InputError(
            f"share-weights: {'; '.join(one.message for one in mistakes)}.",
            code=mistakes[0].code,
            setting=mistakes[0].setting,
            found=mistakes,
        )
    stacks: dict[str, list[Block]] = {}
    for block in blocks_of(model):
        if settings.stacks is None or block.stack.name in settings.stacks:
            stacks.setdefault(block.stack.name, []).append(block)
    shared: dict[str, list[list[int]]] = {}
    notes: list[Message] = []
    for name, blocks in stacks.items():
        together = [g for g in grouped(len(blocks), settings) if len(g) > 1]
        shared[name] = [[blocks[at].number for at in group] for group in together]
        if not together:
            notes.append(
                warning(
                    "single-layer-groups",
                    f"The {len(blocks)} {name} are not shared: each group has one layer.",
                )
            )
        for group in together:
            there = _parts([blocks[at] for at in group], settings)
            if not there:
                said = ", ".join(str(blocks[at].number) for at in group)
                notes.append(
                    warning(
                        "no-part-in-common",
                        f"The {name} {said} are not shared: an earlier step removed parts, and no two have"
                        f" one of targets: {settings.targets} in common.",
                    )
                )
            for parts in there:
                notes.extend(_share(model, edits, parts, settings, {} if lost is None else lost))
    return shared, notes


def grouped(layers: int, settings: ShareWeightsSettings) -> list[list[int]]:
    """Return the numbers of `layers` layers in groups of neighbours; one that stays alone is a group."""
    every = settings.group_size or _DEFAULT_EVERY
    first = 1 if settings.exclude_first_and_last else 0
    inner = range(first, layers - first)
    groups: dict[int, list[int]] = {}
    for place, number in enumerate(inner):
        at = (
            place // every
            if settings.groups is None
            else place * min(settings.groups, len(inner)) // len(inner)
        )
        groups.setdefault(at, []).append(number)
    ends = [[at] for at in sorted({0, layers - 1}) if at not in inner]
    return sorted([*groups.values(), *ends])


def _parts(blocks: list[Block], settings: ShareWeightsSettings) -> list[list[tuple[str, ...]]]:
    """Return what can be shared: for each part of a block, the names of its products in every block."""
    found: list[list[tuple[str, ...]]] = []
    if "attention" in settings.targets:
        for kind in blocks[0].stack.attentions:
            ends = f".{kind.query}"
            there = [[a.products for a in block.attentions if a.query.endswith(ends)] for block in blocks]
            found.append([products for each in there for products in each])
    if "ffn" in settings.targets:
        feeds = [block.feed_forward for block in blocks]
        found.append([feed.products for feed in feeds if feed is not None])
    return [parts for parts in found if len(parts) > 1]  # a part that was skipped shares nothing


def _share(
    model: Any,
    edits: list[Edit],
    parts: list[tuple[str, ...]],
    settings: ShareWeightsSettings,
    lost: dict[str, float],
) -> list[Message]:
    """Share the products of one part of several blocks, all or none; return why not."""
    from smelt.runtime.models.structure import replace_layer

    take = settings.init_from
    code, reason = _reason(model, parts, settings)
    if code is not None:
        return [warning(code, f"{parts[0][0]} ... {parts[-1][-1]} are not shared: {reason}.")]
    if all(len({id(model.get_submodule(name)) for name in names}) == 1 for names in zip(*parts, strict=True)):
        return [
            warning(
                "already-shared",
                f"{parts[0][0]} ... {parts[-1][-1]} are shared already; nothing changes.",
            )
        ]
    for names in zip(*parts, strict=True):
        if settings.low_rank_delta is not None:
            _divide(model, edits, names, settings, lost)
            continue
        owner = model.get_submodule(names[0])
        _fill(owner, [model.get_submodule(name) for name in names], take)
        for name in names[1:]:
            if model.get_submodule(name) is not owner:
                edit = {"op": "share", "module": name, "with": names[0]}
                replace_layer(model, edits, name, owner, edit)
    return []


def _divide(
    model: Any,
    edits: list[Edit],
    names: tuple[str, ...],
    settings: ShareWeightsSettings,
    lost: dict[str, float],
) -> None:
    """Let the products `names` share a matrix beside a difference of each; those that are one stay so."""
    import torch

    from smelt.compress.share.difference import divide
    from smelt.runtime.models.structure import replace_layer

    assert settings.low_rank_delta is not None
    rank, iterations = settings.low_rank_delta.rank, settings.low_rank_delta.iterations
    own = {model.get_submodule(name): name for name in reversed(names)}  # by module its first name
    layers = list(reversed(own))
    if len(layers) == 1:
        return
    weights = [layer.weight.detach() for layer in layers]
    start = {"first": weights[0], "last": weights[-1], "mean": torch.stack(weights).double().mean(dim=0)}
    made, off = divide(layers, start[settings.init_from], rank, iterations)
    lost[names[0]] = float(f"{off:.3g}")
    for layer, new in zip(layers, made, strict=True):
        edit = {"op": "difference", "module": own[layer], "rank": new.rank}
        replace_layer(model, edits, own[layer], new, edit)
    first = own[layers[0]]
    for layer in layers[1:]:
        edits.append({"op": "share", "module": f"{own[layer]}.shared", "with": f"{first}.shared"})


def _reason(
    model: Any, parts: list[tuple[str, ...]], settings: ShareWeightsSettings
) -> tuple[str, str] | tuple[None, None]:
    """Return code and text of why these products cannot be shared, None twice where they can."""
    from torch import nn

    from smelt.runtime.layers.shared import SharedLinear

    for names in zip(*parts, strict=True):
        modules = [model.get_submodule(name) for name in names]
        sizes = [_sizes(module) for module in modules]
        odd = next((at for at, size in enumerate(sizes) if size != sizes[0]), None)
        if odd is not None:
            return "shape-mismatch", f"{names[0]} has {sizes[0]}, {names[odd]} has {sizes[odd]}"
        if isinstance(modules[0], nn.Linear):
            continue
        if isinstance(modules[0], SharedLinear):
            if settings.init_from == "mean" or settings.low_rank_delta is not None:
                text = f"{names[0]} has a difference already (init_from: first, without low_rank_delta)"
                return "already-shared", text
        elif settings.low_rank_delta is not None:
            text = f"{names[0]} is factorized, and its factors have no thin difference; share first"
            return "already-factorized", text
        elif settings.init_from == "mean":
            text = f"{names[0]} is factorized, and factors have no mean (set init_from: first)"
            return "already-factorized", text
    return None, None


def _sizes(module: nn.Module) -> str:
    tensors = ", ".join(f"{name} {list(value.shape)}" for name, value in module.state_dict().items())
    return f"{type(module).__name__} {tensors}"


def _fill(owner: nn.Module, modules: list[nn.Module], take: str) -> None:
    """Give `owner`, the first of `modules`, the values that the group gets."""
    import torch

    states = [module.state_dict() for module in modules]
    if take == "mean":
        mean = {n: torch.stack([s[n].double() for s in states]).mean(dim=0) for n in states[0]}
        owner.load_state_dict(mean)
    elif take == "last":
        owner.load_state_dict(states[-1])
