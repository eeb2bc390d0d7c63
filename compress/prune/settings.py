"""The settings of `prune`, their checks against a model's config, and `learned_masks` (no torch)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from smelt.compress.prune.importances.registry import IMPORTANCES
from smelt.core.errors import InputError, SettingError
from smelt.core.messages import Message, error_message, warning, with_article
from smelt.core.system import install_command, package_problem
from smelt.data.tasks import Task, task_traits
from smelt.models.families.limits import fixed_width_reason, no_blocks_reason
from smelt.models.families.registry import FAMILIES, find_family, reads_images
from smelt.models.model_size import ModelSize, StackSize
from smelt.models.text_rules import position_limit
from smelt.stage import Settings, StoredDtype

# Settings that a budget replaces.
_REPLACED_BY_BUDGET = ("keep_ratio", "scope")
Ratio = Annotated[float, Field(gt=0, le=1)]
BUDGET_MEASURES = ("parameters", "flops", "latency")


class Budget(Settings):
    """A budget for the whole model, as a fraction of its present cost. Give one of the first three."""

    parameters: float | None = Field(
        default=None, gt=0, lt=1, description="fraction of the stored parameters"
    )
    flops: float | None = Field(
        default=None, gt=0, lt=1, description="fraction of a forward pass's multiply-adds"
    )
    latency: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="fraction of a forward pass's time, by timings on this machine",
    )
    sequence_length: int | None = Field(
        default=None,
        ge=1,
        description="for flops and latency: tokens; default: the mean of the data; not for images",
    )
    measure_on: Literal["ort-cpu", "ort-cpu-int8", "torch"] | None = Field(
        default=None, description="runtime of the timings; default: ort-cpu"
    )

    @model_validator(mode="after")
    def _check_measure(self) -> Self:
        measures = [name for name in BUDGET_MEASURES if getattr(self, name) is not None]
        if len(measures) != 1:
            measures_text = " and ".join(measures) or "none"
            raise SettingError(
                f"expected one of {', '.join(BUDGET_MEASURES)}, got {measures_text}",
                code="settings-conflict" if measures else "missing-setting",
            )
        if self.sequence_length is not None and measures == ["parameters"]:
            raise SettingError(
                "sequence_length has no effect on a budget of parameters; remove it", code="unused-setting"
            )
        if self.measure_on is not None and measures != ["latency"]:
            raise SettingError(
                "measure_on has no effect without a budget of latency; remove it", code="unused-setting"
            )
        return self

    @property
    def measure(self) -> str:
        """The measure that the budget limits."""
        return next(name for name in BUDGET_MEASURES if getattr(self, name) is not None)

    @property
    def keep_ratio(self) -> float:
        """The fraction that may remain."""
        return float(getattr(self, self.measure))


class PruneSettings(Settings):
    """Settings of `prune`. Each layer keeps at least one head and one multiple of neurons.

    The number of units kept is rounded to the nearest whole one; a half is rounded up.
    """

    targets: list[Literal["heads", "ffn", "width", "layers", "channels"]] = Field(
        default=["ffn"],
        min_length=1,
        description="heads and ffn (default with a budget), with it also layers and width (hidden states);"
        " or width or channels (convolutions) alone; default: those of keep_ratio",
    )
    keep_ratio: Ratio | dict[Literal["heads", "ffn"], Ratio] = Field(
        default=0.75,
        description="kept fraction of units, or one per target: {heads: 0.75, ffn: 0.5}",
    )
    budget: Budget | None = Field(
        default=None,
        description="instead of keep_ratio: fraction of the whole model's cost",
    )
    scope: Literal["layer", "global"] = Field(
        default="layer",
        description="layer: the same fraction in each layer; global: units of one kind compete across layers",
    )
    importance: Literal[tuple(IMPORTANCES)] = Field(  # type: ignore[valid-type]
        default="taylor",
        description="; ".join(f"{name}: {known.description}" for name, known in IMPORTANCES.items()),
    )
    calibration_samples: int | None = Field(
        default=None,
        ge=1,
        description=f"for {', '.join(n for n, known in IMPORTANCES.items() if known.needs != 'weights')} and"
        " reconstruct; default: 256 for gradients (taylor, fisher, obs), else ten tokens per input of the"
        " widest layer",
    )
    batch_size: int = Field(
        default=16,
        ge=1,
        description=f"for {', '.join(n for n, known in IMPORTANCES.items() if known.needs == 'labels')}",
    )
    reconstruct: bool = Field(
        default=True,
        description="refit the following layers by least squares; not for channels",
    )
    multiple_of: int = Field(default=8, ge=1, description="kept neurons or channels are a multiple of this")
    dtype: StoredDtype = "keep"

    def keep_ratio_of(self, target: str) -> float:
        """Return the fraction of the units of one kind that is kept."""
        return self.keep_ratio[target] if isinstance(self.keep_ratio, dict) else self.keep_ratio  # type: ignore[index]

    @property
    def searches_shape(self) -> bool:
        """Whether layers or channels of the hidden states are removed within a budget."""
        return self.budget is not None and not {"layers", "width"}.isdisjoint(self.targets)

    def to_report(self) -> dict[str, Any]:
        """Return what a report shows: no setting that a budget replaces, no `reconstruct` of channels."""
        unused: tuple[str, ...] = _REPLACED_BY_BUDGET if self.budget is not None else ()
        if "channels" in self.targets and self.reconstruct:  # the default, which channels ignore
            unused = ("reconstruct",)
        return {name: value for name, value in super().to_report().items() if name not in unused}

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, value: Any) -> Any:
        """Choose the targets that keep_ratio or a budget means, and the importance that they need."""
        if not isinstance(value, dict):
            return value
        ratio = value.get("keep_ratio")
        if "targets" not in value and isinstance(ratio, dict) and ratio:
            value = value | {"targets": list(ratio)}
        if "targets" not in value and value.get("budget") is not None:
            value = value | {"targets": ["heads", "ffn"]}
        if "importance" in value:
            return value
        targets = value.get("targets")
        narrows = isinstance(targets, list | tuple | set) and set(map(str, targets)) == {"width"}
        if narrows:
            return value | {"importance": "activation"}
        if value.get("budget") is None:
            return value
        units = {"heads", "ffn", "width", "layers"}
        has_units = isinstance(targets, list | tuple | set) and set(map(str, targets)) <= units
        refits = has_units and value.get("reconstruct") is not False
        return value | {"importance": "obs" if refits else "fisher"}

    @model_validator(mode="after")
    def _check_reconstruct(self) -> Self:
        if self.importance == "obs" and not self.reconstruct:
            raise SettingError(
                "importance: obs scores a removal by the loss after a refit; remove reconstruct: false, or"
                " use importance: fisher",
                code="settings-conflict",
            )
        return self

    @model_validator(mode="after")
    def _check_keep_ratio(self) -> Self:
        if isinstance(self.keep_ratio, dict) and set(self.keep_ratio) != set(self.targets):
            raise SettingError(
                f"keep_ratio has values for {', '.join(self.keep_ratio) or 'nothing'}, but targets are"
                f" [{', '.join(self.targets)}]. Set keep_ratio for each target, or to one number",
                code="settings-conflict",
            )
        return self

    @model_validator(mode="after")
    def _check_importance(self) -> Self:
        supported = IMPORTANCES[self.importance].targets
        scored = set(self.targets) - ({"layers", "width"} if self.searches_shape else {"layers"})
        if not scored <= set(supported):
            alternatives = [n for n, importance in IMPORTANCES.items() if scored <= set(importance.targets)]
            raise SettingError(
                f"importance: {self.importance} applies only to targets: [{', '.join(supported)}]; use"
                f" {' or '.join(alternatives)}",
                code="wrong-importance",
            )
        return self

    @model_validator(mode="after")
    def _check_layers_and_width(self) -> Self:
        if self.searches_shape and {"heads", "ffn"}.isdisjoint(self.targets):
            raise SettingError(
                "a budget is met by removing heads and neurons, in addition to layers and width; add heads or"
                " ffn to targets, or set keep_ratio instead of budget",
                code="unused-setting",
            )
        if self.searches_shape:
            return self
        if "layers" in self.targets:
            raise SettingError(
                "layers can be removed only within a budget; set budget, or use the stage drop-layers",
                code="settings-conflict",
            )
        if "width" in self.targets and len(set(self.targets)) > 1:
            raise SettingError(
                "width can be combined with other targets only within a budget; set budget, or prune it in a"
                " separate step",
                code="settings-conflict",
            )
        if "width" in self.targets and self.scope == "global":
            raise SettingError(
                "scope: global applies only to heads and neurons; for width set keep_ratio",
                code="unused-setting",
            )
        return self

    @model_validator(mode="after")
    def _check_channels(self) -> Self:
        if "channels" not in self.targets:
            return self
        if len(set(self.targets)) > 1:
            raise SettingError(
                "channels cannot be combined with other targets; prune them in a separate step",
                code="settings-conflict",
            )
        if self.budget is not None:
            raise SettingError(
                "a budget applies only to heads and neurons; for channels set keep_ratio and scope",
                code="unused-setting",
            )
        if self.reconstruct and "reconstruct" in self.model_fields_set:
            raise SettingError(
                "reconstruct applies only to linear layers, not to channels of convolutions; remove it",
                code="unused-setting",
            )
        return self

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.budget is None:
            return self
        both = sorted(self.model_fields_set.intersection(_REPLACED_BY_BUDGET))
        if both:
            raise SettingError(
                f"a budget decides how many units are kept; remove {' and '.join(both)}",
                code="settings-conflict",
            )
        if not IMPORTANCES[self.importance].compares_kinds and {"heads", "ffn"} <= set(self.targets):
            alternatives = [name for name, importance in IMPORTANCES.items() if importance.needs == "labels"]
            raise SettingError(
                f"importance: {self.importance} cannot compare heads with neurons, which a budget requires;"
                f" use importance: {' or '.join(alternatives)}, or one target",
                code="wrong-importance",
            )
        return self


# Why a sentence embedder keeps its width.
_FIXED_WIDTH_REASONS = {
    "embedding": "the embeddings of a sentence embedder are its hidden states, and narrower embeddings cannot"
    " be compared with stored ones",
    "joint-embeddings": "the two towers of the model have hidden states of their own",
    "masked-tokens": "the layers between the hidden states and the output of a masked language model cannot"
    " be narrowed",
}


def fixed_width_errors(task: Task, targets: Collection[str], setting: str) -> list[Message]:
    """Return the error if `targets`, the value of `setting`, has a width that models of `task` must keep."""
    reason = _FIXED_WIDTH_REASONS.get(task_traits(task).output)
    if reason is None or "width" not in targets:
        return []
    return [error_message("fixed-width", f"{reason}. Set targets: [heads, ffn].", setting=setting)]


def fixed_channel_errors(config: Mapping[str, Any], targets: Collection[str], setting: str) -> list[Message]:
    """Return the error if `targets`, the value of `setting`, has a width that models of `config` keep."""
    reason = fixed_width_reason(config)
    if reason is None or "width" not in targets:
        return []
    return [error_message("fixed-width", f"{reason}. Set targets: [heads, ffn].", setting=setting)]


def check_units(targets: Sequence[str], config: Mapping[str, Any]) -> list[Message]:
    """Return errors about targets that cannot be removed from a model of this config.

    Args:
        targets: heads, ffn, width, channels.
        config: the Hugging Face config of the input model, as a dict.

    Returns:
        One message per error, with its setting.
    """
    family = find_family(config)
    if family is not None and family.is_user_module:
        return _user_module_errors(targets, reads_images(config))
    if "channels" in targets:
        remedy = "Set targets: [heads, ffn]." if no_blocks_reason(config) is None else "Remove prune."
        text = f"{config.get('model_type')} models have no chains of convolutions. {remedy}"
        has_chains = family is None or family.conv_chain is not None
        return [] if has_chains else [error_message("does-not-fit-model", text, setting="targets")]
    if (no_blocks := no_blocks_reason(config)) is not None:
        has_chains = family is not None and family.conv_chain is not None
        remedy = (
            "Prune the channels of its convolutions: set targets: [channels]"
            if has_chains
            else "Remove prune"
        )
        text = f"{no_blocks}. {remedy}."
        return [error_message("does-not-fit-model", text, setting="targets")]
    if "width" in targets:
        return fixed_channel_errors(config, targets, "targets")
    reason = _fixed_heads_reason(config)
    if not reason or set(targets) != {"heads"}:
        return []
    return [error_message("fixed-heads", f"{reason} Set targets: [ffn].", setting="targets")]


TORCH_PRUNING_VERSION = "1.6.1"  # the oldest release that is supported


def _user_module_errors(targets: Sequence[str], of_images: bool) -> list[Message]:
    """Return errors about targets of a PyTorch module of the user's own, and of a missing torch-pruning."""
    if not of_images:
        text = "only of modules with images as input channels can be pruned. Remove prune."
        return [error_message("does-not-fit-model", text, setting="targets")]
    if "channels" not in targets:
        text = "of a PyTorch module of your own only channels can be pruned. Set targets: [channels]."
        return [error_message("does-not-fit-model", text, setting="targets")]
    problem = package_problem("torch-pruning", TORCH_PRUNING_VERSION)
    if problem is None:
        return []
    text = f"{problem}. {install_command('torch-pruning', TORCH_PRUNING_VERSION)}"
    return [error_message("not-installed", text, setting="targets")]


def check_towers(settings: PruneSettings, config: Mapping[str, Any]) -> list[Message]:
    """Return the errors, each with its setting, of what is not counted in a model of two towers."""
    family = find_family(config)
    if family is None or not family.towers:
        return []
    errors = []
    if "layers" in settings.targets:
        text = "layers of two towers are not compared with each other. Use the stage drop-layers."
        errors.append(error_message("does-not-fit-model", text, setting="targets"))
    if settings.budget is not None and settings.budget.measure != "parameters":
        text = "multiplications and latency of two towers are not counted. Set budget: {parameters: N}."
        errors.append(error_message("does-not-fit-model", text, setting="budget"))
    return errors


def check_length(length: int | None, config: Mapping[str, Any]) -> list[Message]:
    """Return an error if a budget's sequence length exceeds the model's position limit, or is of images.

    Args:
        length: tokens; None for the default.
        config: as in `check_units`.

    Returns:
        The error with its setting, or an empty list.
    """
    if length is not None and reads_images(config):
        text = "the size of the images decides the number of tokens. Remove sequence_length."
        return [error_message("unused-setting", text, setting="budget.sequence_length")]
    max_positions = position_limit(config)
    if length is None or max_positions is None or length <= max_positions:
        return []
    return [
        error_message(
            "longer-than-model",
            f"{length:,} tokens exceed the model's {max_positions:,} positions. Lower sequence_length.",
            setting="budget.sequence_length",
        )
    ]


def count_kept_channels(count: int, settings: PruneSettings) -> int:
    """Return how many of `count` channels are kept: the nearest multiple of `multiple_of`, at least one."""
    multiples = count * settings.keep_ratio_of("width") / settings.multiple_of
    return min(count, max(1, math.floor(multiples + 0.5)) * settings.multiple_of)


def least_parameters(settings: PruneSettings, size: ModelSize) -> int:
    """Return how many parameters a model of this size has at least after its targets are removed.

    Biases, norms and positions are not counted, nor are the last heads.
    """
    heads = 0.0 if "heads" in settings.targets else 1.0
    stacks = [
        replace(
            stack.with_units(heads, _least_neurons(stack, settings)),
            layers=1 if "layers" in settings.targets else stack.layers,
        )
        for stack in size.stacks
    ]
    return replace(size, stacks=tuple(stacks), other_weights=0).parameters


def _least_neurons(stack: StackSize, settings: PruneSettings) -> float:
    """Return the part of a block's neurons that is always kept."""
    neurons = stack.matrices[stack.feed_forward - 1][1]
    return min(1.0, settings.multiple_of / neurons) if "ffn" in settings.targets else 1.0


def obs_bytes(size: ModelSize) -> tuple[int, int]:
    """Return the bytes of the matrices G of outputs and H of inputs that `obs` holds, float64.

    Both are of all layers that read heads or neurons.
    """
    shapes = [(stack.layers, shape) for stack in size.stacks for shape in stack.output_matrices]
    outputs, inputs = (sum(layers * shape[axis] ** 2 for layers, shape in shapes) for axis in (0, 1))
    return 8 * outputs, 8 * inputs


def narrowed_config(settings: PruneSettings, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the model after its hidden width is pruned, for the checks of later steps."""
    family = find_family(config)
    narrows = "width" in settings.targets and settings.budget is None  # else it is not known before the run
    width = family.hidden_size(config) if family is not None and narrows else None
    if family is None or width is None:
        return config
    return family.with_hidden_size(config, count_kept_channels(width, settings))


def fixed_width_error(config: Mapping[str, Any], task: Task) -> Message | None:
    """Return why the hidden width of a model of this config cannot be pruned; None where it can."""
    family = find_family(config)
    if (reason := no_blocks_reason(config)) is not None:
        return error_message(
            "does-not-fit-model", f"{reason}, so it has no hidden width to prune.", setting="targets"
        )
    if family is None:
        kind = str(config.get("model_type"))
        return error_message(
            "unsupported-family",
            f"{with_article(kind)} model is not supported. Supported: {', '.join(FAMILIES)}.",
        )
    errors = fixed_width_errors(task, ("width",), "targets")
    return next(iter([*errors, *fixed_channel_errors(config, ("width",), "targets")]), None)


def fixed_heads_warnings(targets: Sequence[str], config: Mapping[str, Any]) -> list[Message]:
    """Return warnings about heads that cannot be removed; arguments as in `check_units`.

    Raises:
        InputError: heads are the only target.
    """
    for error in check_units(targets, config):
        raise InputError(f"prune: {error.message}", code=error.code, setting=error.setting)
    reason = _fixed_heads_reason(config)
    return [warning("heads-kept", f"{reason} The heads are kept.")] if reason and "heads" in targets else []


def _fixed_heads_reason(config: Mapping[str, Any]) -> str:
    """Return why the heads of a model of this Hugging Face config cannot be removed; empty where they can."""
    family = find_family(config)
    attentions = [a for stack in family.stacks(config) for a in stack.attentions] if family else []
    reasons = sorted({a.fixed_heads_reason for a in attentions if a.fixed_heads_reason})
    if not reasons:
        return ""
    return f"the heads of {with_article(config['model_type'])} model cannot be removed: {'; '.join(reasons)}."


class LearnedMasksSettings(Settings):
    """Masks that are learned under a parameter budget; masked units are removed after training."""

    targets: tuple[Literal["heads", "ffn", "width"], ...] = Field(
        default=("heads", "ffn"),
        description="units with masks; width: channels of the hidden states; [] if only parts have masks",
    )
    parts: tuple[Literal["attention", "cross-attention", "ffn"], ...] = Field(
        default=(),
        description="parts of layers with masks, as in `drop-layers`",
    )
    keep_ratio: float = Field(
        default=0.5, gt=0, lt=1, description="kept fraction of the parameters with masks"
    )
    warmup: float = Field(
        default=0.4,
        gt=0,
        le=1,
        description="fraction of the updates until the kept fraction falls to keep_ratio",
    )
    learning_rate: float = Field(default=0.1, gt=0, description="peak learning rate of masks and multipliers")
    multiple_of: int = Field(default=8, ge=1, description="kept neurons or channels are a multiple of this")

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if not (self.targets or self.parts):
            raise SettingError(
                "targets and parts are both empty, so there is nothing to mask; set targets, such as"
                " [heads, ffn]",
                code="missing-setting",
            )
        return self
