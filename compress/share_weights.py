"""The stage `share-weights` and its settings: layers share weights, which are stored once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from smelt.compress.model_input import load_float_model
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, SettingError
from smelt.core.messages import Message, error_message, warning, with_article
from smelt.models.families.limits import no_blocks_reason
from smelt.models.families.registry import (
    FAMILIES,
    blocks_of,
    family_of,
    norm_consumers,
    predicts_tokens,
    token_lookup_modules,
)
from smelt.stage import Context, Settings, Stage, StoredDtype

if TYPE_CHECKING:
    from torch import nn

    from smelt.models.edits import Edit
    from smelt.models.families.registry import Block


class LowRankDelta(Settings):
    """A low-rank matrix that each layer of a group adds to the shared weights, and its bias."""

    rank: int = Field(ge=1, description="at most the smaller dimension of a layer")
    iterations: int = Field(
        default=1,
        ge=1,
        le=100,
        description="alternating updates of deltas and shared weights",
    )


class ShareWeightsSettings(Settings):
    """Settings of `share-weights`. Give groups or layers_per_group (default: 2)."""

    targets: list[Literal["attention", "ffn", "norms", "layers", "embeddings"]] = Field(
        default=["attention", "ffn"],
        min_length=1,
        description="linear layers of attention, of the feed-forward part; norms; layers: these three;"
        " embeddings: token embeddings and output layer",
    )
    groups: int | None = Field(
        default=None,
        ge=1,
        description="groups of layers per stack",
    )
    layers_per_group: int | None = Field(default=None, ge=2, description="layers in a group")
    pattern: Literal["sequence", "cycle", "cycle-reversed"] = Field(
        default="sequence",
        description="which layers share: neighbors; every n-th of n groups; likewise, the last n in reversed"
        " order",
    )
    exclude_first_and_last: bool = Field(
        default=False, description="the first and last layer of each stack keep their weights"
    )
    init_from: Literal["first", "mean", "last"] = Field(
        default="first",
        description="a group's initial weights: of one layer, or the mean",
    )
    stacks: (
        list[Literal["layers", "encoder_layers", "decoder_layers", "text_layers", "vision_layers"]] | None
    ) = Field(default=None, min_length=1, description="stacks whose layers are shared; default: all")
    low_rank_delta: LowRankDelta | None = Field(
        default=None, description="a low-rank difference for each layer"
    )
    dtype: StoredDtype = "keep"

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.groups is not None and self.layers_per_group is not None:
            raise SettingError("set either groups or layers_per_group, not both", code="settings-conflict")
        without_delta = {"norms", "layers", "embeddings"} & {*self.targets}
        if self.low_rank_delta is not None and without_delta:
            raise SettingError(
                f"low_rank_delta is for linear layers, not for {', '.join(sorted(without_delta))}. Remove"
                " low_rank_delta, or these targets.",
                code="settings-conflict",
            )
        return self


_DEFAULT_GROUP_SIZE = 2


class ShareWeights(Stage[ShareWeightsSettings]):
    """Share weights between layers of a stack.

    Saves size, not time: as many layers are computed as before. Shared weights are stored once, in
    files and in graphs, and are trained, pruned, factorized and quantized once.
    Layers of a trained model are not interchangeable, so quality falls a lot at once; add distill
    (or finetune). With low_rank_delta each layer adds a low-rank difference, found by singular value
    decomposition, and its own bias to the shared matrix; training then updates both.

        - share-weights: {targets: [ffn], exclude_first_and_last: true}
        - share-weights: {targets: [layers, embeddings], groups: 3, pattern: cycle}
        - share-weights: {init_from: mean, low_rank_delta: {rank: 16}}
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "share-weights"
    source: ClassVar[str] = (
        "patterns: Takase & Kiyono 2021, arXiv:2104.06022; exclude_first_and_last: Subformer, Reid et al."
        " 2021, arXiv:2101.00234; attention, feed-forward or all: ALBERT, Lan et al. 2020, arXiv:1909.11942;"
        " embeddings: Press & Wolf 2017, arXiv:1608.05859; low_rank_delta: Relaxed Recursive Transformers,"
        " Bae et al. 2024, arXiv:2410.20672"
    )
    version: ClassVar[int] = 1
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[ShareWeightsSettings]] = ShareWeightsSettings

    @classmethod
    def invalidates(cls, settings: ShareWeightsSettings) -> Mapping[str, str]:
        """Return what this step loses of earlier steps, or what prevents sharing.

        Layers of different sizes cannot be shared; the shared matrix with differences has no zeros.
        """
        zeros = {
            "zeros": "shared matrices and their low-rank differences are dense: the zeros of '{step}' are"
            " lost; put share-weights before '{step}'"
        }
        return (zeros if settings.low_rank_delta is not None else {}) | {
            "widths": "'{step}' makes layers of different sizes, which cannot be shared; put share-weights"
            " before '{step}', which then prunes shared layers together"
        }

    @classmethod
    def unit_pruning_error(cls, settings: ShareWeightsSettings) -> str | None:
        """Return why heads and neurons of the result cannot be pruned; None if they can."""
        if settings.low_rank_delta is None:
            return None
        return "its layers share a matrix and add differences, so units can only be removed from all of them"

    @classmethod
    def check_model(
        cls, settings: ShareWeightsSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the errors, by setting, for a model of this config, and the config of the result."""
        family = FAMILIES.get(str(config.get("model_type")))
        if (reason := no_blocks_reason(config)) is not None:
            return [error_message("does-not-fit-model", f"{reason}; remove share-weights.")], config
        stacks = [stack.name for stack in family.stacks(config)] if family else []
        errors = [
            error_message(
                "unknown-stack",
                f"{with_article(config.get('model_type'))} model has the stacks {' and '.join(stacks)},"
                f" not '{name}'",
                setting="stacks",
            )
            for name in settings.stacks or ()
            if stacks and name not in stacks
        ]
        return errors, config

    def __call__(self, src: Artifact, settings: ShareWeightsSettings, ctx: Context) -> None:
        """Share weights among the layers of `src` and write the model to `ctx.out`."""
        from smelt.models.checkpoint import count_stored_parameters, save_model
        from smelt.runtimes.device import torch_threads

        with torch_threads(ctx.threads):
            model, edits = load_float_model(src, self.name)
            ctx.details["parameters_before"] = count_stored_parameters(model)
            residuals: dict[str, float] = {}
            shared, unshared = share_layers(model, edits, settings, residuals)
            if "embeddings" in settings.targets:
                ctx.details["embeddings"], not_tied = share_embeddings(model, edits, settings.init_from)
                unshared += not_tied
            ctx.details["parameters_after"] = count_stored_parameters(model)
            if settings.low_rank_delta is not None:
                ctx.details["lost"] = residuals
            ctx.details["groups"] = shared
            ctx.warnings.extend(unshared)
            ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))


def share_layers(
    model: Any, edits: list[Edit], settings: ShareWeightsSettings, residuals: dict[str, float] | None = None
) -> tuple[dict[str, list[list[int]]], list[Message]]:
    """Share weights between the layers of `model` in place; append the edits to `edits`.

    residuals: receives, by the first name of each linear layer, the part of the squared distances from the
    mean of a group that the differences do not represent.

    Returns:
        The indices of the layers in each group by stack, and warnings about layers that are not shared.

    Raises:
        InputError: an unsupported family, or none of the stacks that the settings name.
    """
    if family_of(model) is None:
        raise InputError(
            f"share-weights: {with_article(model.config.model_type)} model is not supported."
            f" Supported: {', '.join(FAMILIES)}.",
            code="unsupported-family",
        )
    errors, _ = ShareWeights.check_model(settings, model.config.to_dict())
    if errors:
        raise InputError(
            f"share-weights: {'; '.join(error.message for error in errors)}.",
            code=errors[0].code,
            setting=errors[0].setting,
            messages=errors,
        )
    stacks: dict[str, list[Block]] = {}
    for block in blocks_of(model) if {*settings.targets} != {"embeddings"} else ():
        if settings.stacks is None or block.stack.name in settings.stacks:
            stacks.setdefault(block.stack.name, []).append(block)
    shared: dict[str, list[list[int]]] = {}
    notes: list[Message] = []
    for name, blocks in stacks.items():
        multi_groups = [g for g in group_layers(len(blocks), settings) if len(g) > 1]
        shared[name] = [[blocks[index].index for index in group] for group in multi_groups]
        if not multi_groups:
            notes.append(
                warning(
                    "single-layer-groups",
                    f"The {len(blocks)} {name} are not shared: each group has one layer. Set layers_per_group"
                    " or groups.",
                )
            )
        for group in multi_groups:
            parts_by_block = _shareable_parts(model, [blocks[index] for index in group], settings)
            if not parts_by_block:
                indices = ", ".join(str(blocks[index].index) for index in group)
                notes.append(
                    warning(
                        "no-part-in-common",
                        f"The {name} {indices} are not shared: an earlier step removed parts, and no two"
                        f" of these layers have a part of targets: {settings.targets} in common.",
                    )
                )
            for parts in parts_by_block:
                notes.extend(
                    _share_parts(model, edits, parts, settings, {} if residuals is None else residuals)
                )
    return shared, notes


def group_layers(layers: int, settings: ShareWeightsSettings) -> list[list[int]]:
    """Return the indices of `layers` layers in groups by the pattern; a single layer is a group."""
    group_size = settings.layers_per_group or _DEFAULT_GROUP_SIZE
    start = 1 if settings.exclude_first_and_last else 0
    inner = range(start, layers - start)
    count = len(inner)
    num_groups = -(-count // group_size) if settings.groups is None else min(settings.groups, count)
    groups: dict[int, list[int]] = {}
    for position, layer_index in enumerate(inner):
        if settings.pattern == "sequence":
            index = position // group_size if settings.groups is None else position * num_groups // count
        else:
            index = position % num_groups
            is_reversed = settings.pattern == "cycle-reversed"
            if is_reversed and position >= num_groups * max(1, -(-count // num_groups) - 1):
                index = num_groups - 1 - index
        groups.setdefault(index, []).append(layer_index)
    single_groups = [[index] for index in sorted({0, layers - 1}) if index not in inner]
    return sorted([*groups.values(), *single_groups])


def _shareable_parts(
    model: Any, blocks: list[Block], settings: ShareWeightsSettings
) -> list[list[tuple[str, ...]]]:
    """Return, for each part of a block, the names of its linear layers, or norm, in every block."""
    by_part: list[list[tuple[str, ...]]] = []
    targets = {*settings.targets} | ({"attention", "ffn", "norms"} if "layers" in settings.targets else set())
    if "attention" in targets:
        for kind in blocks[0].stack.attentions:
            suffix = f".{kind.query}"
            linear_layers = [
                [a.linear_layers for a in block.attentions if a.query.endswith(suffix)] for block in blocks
            ]
            by_part.append([layer_names for block_layers in linear_layers for layer_names in block_layers])
    if "ffn" in targets:
        layers_of_blocks = [[n for part in b.feed_forwards for n in part.linear_layers] for b in blocks]
        by_part.append([tuple(names) for names in layers_of_blocks if names])
    if "norms" in targets:
        norms = {model.get_submodule(consumers.norm) for consumers in norm_consumers(model)}
        by_suffix: dict[str, list[tuple[str, ...]]] = {}
        for block in blocks:
            for suffix, module in block.module.named_modules(remove_duplicate=False):
                if module in norms:
                    by_suffix.setdefault(suffix, []).append((f"{block.module_path}.{suffix}",))
        by_part += by_suffix.values()
    return [parts for parts in by_part if len(parts) > 1]  # a removed part shares nothing


def _share_parts(
    model: Any,
    edits: list[Edit],
    parts: list[tuple[str, ...]],
    settings: ShareWeightsSettings,
    lost: dict[str, float],
) -> list[Message]:
    """Share the linear layers of one part of several blocks, all or none; return warnings."""
    from smelt.models.edits import replace_layer

    take = settings.init_from
    code, reason = _unshareable_reason(model, parts, settings)
    if code is not None:
        return [warning(code, f"{parts[0][0]} ... {parts[-1][-1]} are not shared: {reason}.")]
    if all(len({id(model.get_submodule(name)) for name in names}) == 1 for names in zip(*parts, strict=True)):
        return [
            warning(
                "already-shared",
                f"{parts[0][0]} ... {parts[-1][-1]} already share their weights; they are unchanged.",
            )
        ]
    for names in zip(*parts, strict=True):
        if settings.low_rank_delta is not None:
            _share_with_delta(model, edits, names, settings, lost)
            continue
        owner = model.get_submodule(names[0])
        _initialize_shared(owner, [model.get_submodule(name) for name in names], take)
        for name in names[1:]:
            if model.get_submodule(name) is not owner:
                edit = {"op": "share", "module": name, "with": names[0]}
                replace_layer(model, edits, name, owner, edit)
    return []


def _share_with_delta(
    model: Any,
    edits: list[Edit],
    names: tuple[str, ...],
    settings: ShareWeightsSettings,
    lost: dict[str, float],
) -> None:
    """Replace the linear layers `names` by a shared matrix and differences; identical ones stay identical."""
    import torch

    from smelt.compress.factorize.svd import make_shared_layers
    from smelt.models.edits import replace_layer

    assert settings.low_rank_delta is not None
    rank, iterations = settings.low_rank_delta.rank, settings.low_rank_delta.iterations
    names_by_layer = {model.get_submodule(name): name for name in reversed(names)}  # by module its first name
    layers = list(reversed(names_by_layer))
    if len(layers) == 1:
        return
    weights = [layer.weight.detach() for layer in layers]
    start = {"first": weights[0], "last": weights[-1], "mean": torch.stack(weights).double().mean(dim=0)}
    replacements, error = make_shared_layers(layers, start[settings.init_from], rank, iterations)
    lost[names[0]] = float(f"{error:.3g}")
    for layer, replacement in zip(layers, replacements, strict=True):
        edit = {"op": "difference", "module": names_by_layer[layer], "rank": replacement.rank}
        replace_layer(model, edits, names_by_layer[layer], replacement, edit)
    owner = names_by_layer[layers[0]]
    for layer in layers[1:]:
        edits.append({"op": "share", "module": f"{names_by_layer[layer]}.shared", "with": f"{owner}.shared"})


def _unshareable_reason(
    model: Any, parts: list[tuple[str, ...]], settings: ShareWeightsSettings
) -> tuple[str, str] | tuple[None, None]:
    """Return the code and text of why these linear layers cannot be shared, or None twice."""
    from smelt.models.layers import LowRankLinear, SharedLinear

    for names in zip(*parts, strict=True):
        modules = [model.get_submodule(name) for name in names]
        sizes = [_describe_shapes(module) for module in modules]
        mismatch = next((index for index, size in enumerate(sizes) if size != sizes[0]), None)
        if mismatch is not None:
            return "shape-mismatch", f"{names[0]} has {sizes[0]}, {names[mismatch]} has {sizes[mismatch]}"
        if not isinstance(modules[0], SharedLinear | LowRankLinear):
            continue
        if isinstance(modules[0], SharedLinear):
            if settings.init_from == "mean" or settings.low_rank_delta is not None:
                text = (
                    f"{names[0]} already has a low-rank delta (set init_from: first, without low_rank_delta)"
                )
                return "already-shared", text
        elif settings.low_rank_delta is not None:
            text = (
                f"{names[0]} is factorized; low_rank_delta needs unfactorized layers. Put share-weights first"
            )
            return "already-factorized", text
        elif settings.init_from == "mean":
            text = f"{names[0]} is factorized, and factors cannot be averaged (set init_from: first)"
            return "already-factorized", text
    return None, None


def share_embeddings(model: Any, edits: list[Edit], init_from: str) -> tuple[list[str], list[Message]]:
    """Share one matrix between the token embeddings and the output layer of `model`, in place.

    Args:
        model: of a supported family.
        edits: receives the edits.
        init_from: whose values it gets: of the input's embedding, of the last user, or the mean.

    Returns:
        The names of the modules that share it, and a warning if there are none, or if their sizes differ.
    """
    import torch
    from torch import nn

    from smelt.models.edits import module_names, replace_layer, tie_linear
    from smelt.quantization.layers import is_embedding_table

    names = {module: all_names[0] for module, all_names in module_names(model).items()}
    tables = list(dict.fromkeys(token_lookup_modules(model))) if predicts_tokens(model) else []
    users = [*tables, *([model.get_output_embeddings()] if tables else [])]
    user_names = [names[user] for user in users]
    if not all(isinstance(user, nn.Linear) or is_embedding_table(user) for user in users):
        return [], [warning("already-factorized", "Factorized embeddings are not shared.")]
    if len({user.weight for user in users}) < 2:
        text = "has no embeddings that do not share their matrix already; embeddings are unchanged."
        return [], [warning("nothing-to-share", f"A {model.config.model_type} model {text}")]
    shapes = [list(user.weight.shape) for user in users]
    if any(shape != shapes[0] for shape in shapes):
        sizes = ", ".join(f"{name} {shape}" for name, shape in zip(user_names, shapes, strict=True))
        return [], [warning("shape-mismatch", f"embeddings are not shared: {sizes}.")]
    weights = [user.weight.detach() for user in users]
    start = {"first": weights[0], "last": weights[-1], "mean": torch.stack(weights).double().mean(dim=0)}
    owner = user_names[0]
    with torch.no_grad():
        users[0].weight.copy_(start[init_from])
    for name in user_names[1 : len(tables)]:
        replace_layer(model, edits, name, users[0], {"op": "share", "module": name, "with": owner})
    if users[-1].weight is not users[0].weight:
        edits.append(tie_linear(model, user_names[-1], owner))
    return user_names, []


def _describe_shapes(module: nn.Module) -> str:
    tensors = ", ".join(f"{name} {list(value.shape)}" for name, value in module.state_dict().items())
    return f"{type(module).__name__} {tensors}"


def _initialize_shared(owner: nn.Module, modules: list[nn.Module], take: str) -> None:
    """Set the shared values of the group in `owner`, the first of `modules`."""
    import torch

    states = [module.state_dict() for module in modules]
    if take == "mean":
        mean = {n: torch.stack([s[n].double() for s in states]).mean(dim=0) for n in states[0]}
        owner.load_state_dict(mean)
    elif take == "last":
        owner.load_state_dict(states[-1])
