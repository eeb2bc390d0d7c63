"""The settings of `drop-layers`, and their checks against a model's config (no torch)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from smelt.core.errors import SettingError, did_you_mean
from smelt.core.messages import Message, error_message, with_article
from smelt.models.families.config_keys import set_config_value
from smelt.models.families.family import Family
from smelt.models.families.layout import STACK_NAMES
from smelt.models.families.limits import no_blocks_reason
from smelt.models.families.registry import find_family
from smelt.stage import Settings, StoredDtype

LayerChoice = int | list[int]
_WHOLE_LAYERS: list[Any] = ["layers"]
# Importance that is measured on samples, or random; the others depend on a layer's position.
PART_IMPORTANCES = ("loss", "block-influence", "random")
# Warning if layers are dropped after a step that dropped parts of layers.
LAYERS_AFTER_PARTS_ERROR = (
    "'{step}' removes parts of layers by its own choice, and one part of each kind must be in the layers that"
    " are kept: otherwise this step keeps more layers, or stops; drop whole layers before '{step}'"
)


class DropLayersSettings(Settings):
    """Settings of `drop-layers`: keep_ratio for all stacks, or layers of each, a number or a list."""

    targets: list[Literal["layers", "attention", "cross-attention", "ffn"]] = Field(
        default=_WHOLE_LAYERS,
        min_length=1,
        description="whole layers, or parts of them",
    )
    keep_ratio: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="kept fraction of each stack; default 0.5",
    )
    encoder_layers: LayerChoice | None = Field(
        default=None, description="encoder-decoder: number of encoder layers to keep, or their indices from 0"
    )
    decoder_layers: LayerChoice | None = Field(default=None, description="likewise, decoder layers")
    layers: LayerChoice | None = Field(default=None, description="likewise, models of one stack")
    text_layers: LayerChoice | None = Field(
        default=None, description="likewise, of the text tower of image-text models"
    )
    vision_layers: LayerChoice | None = Field(default=None, description="likewise, their vision tower")
    importance: Literal["loss", "block-influence", "uniform", "first", "last", "random"] = Field(
        default="loss",
        description="loss: remove one by one by the loss without it; block-influence: keep those that change"
        " hidden states most",
    )
    calibration_samples: int = Field(default=128, ge=1, description="for block-influence and loss")
    dtype: StoredDtype = "keep"

    @field_validator(*STACK_NAMES)
    @classmethod
    def _check_layer_choice(cls, value: LayerChoice | None) -> LayerChoice | None:
        if (isinstance(value, int) and value < 1) or value == []:
            raise SettingError("the number of layers to keep is 0; keep at least one", code="nothing-kept")
        return value

    @property
    def parts(self) -> tuple[str, ...]:
        """The kinds of parts that are removed, each once; none for whole layers."""
        return () if self.targets == _WHOLE_LAYERS else tuple(dict.fromkeys(self.targets))

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if self.parts and "layers" in self.parts:
            raise SettingError(
                "layers cannot be combined with other targets; use [layers] for whole layers, or only parts",
                code="settings-conflict",
            )
        if self.parts and self.importance not in PART_IMPORTANCES:
            raise SettingError(
                f"importance: {self.importance} applies only to whole layers; for parts use"
                f" {', '.join(PART_IMPORTANCES)}",
                code="wrong-importance",
            )
        return self


_DEFAULT_KEEP = 0.5


def kept_layers(settings: Any, stacks: Mapping[str, int]) -> dict[str, int | list[int]]:
    """Return the number, or the indices, of the layers to keep, by stack.

    Args:
        settings: a `DropLayersSettings`. A stack that it names gets that value; other stacks keep
            `keep_ratio` of their layers, rounded (a half up), at least one. If stacks are named and
            `keep_ratio` is not, other stacks are unchanged.
        stacks: number of layers by stack.
    """
    fraction = kept_fraction(settings)
    layers_by_stack: dict[str, int | list[int]] = {}
    for name, count in stacks.items():
        choice = getattr(settings, name)
        layers_by_stack[name] = max(1, math.floor(fraction * count + 0.5)) if choice is None else choice
    return layers_by_stack


def kept_fraction(settings: Any) -> float:
    """Return the kept fraction of layers for stacks that the settings do not name."""
    if settings.keep_ratio is not None:
        return float(settings.keep_ratio)
    return 1.0 if any(getattr(settings, name) is not None for name in STACK_NAMES) else _DEFAULT_KEEP


def check_layer_counts(settings: Any, config: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
    """Check the layers to keep against the layers of a model.

    Args:
        settings: a `DropLayersSettings`.
        config: the Hugging Face config of the step's input model, as a dict.

    Returns:
        The errors, each with its setting, and the config of the result.
    """
    family, result_config = find_family(config), copy.deepcopy(dict(config))
    errors: list[Message] = []
    if family is None:
        return [], result_config
    if (reason := no_blocks_reason(config)) is not None:
        return [error_message("does-not-fit-model", f"{reason}; remove drop-layers.")], result_config
    if settings.parts:
        return check_parts(settings, config), result_config
    stacks = {stack.name: stack for stack in family.stacks(config)}
    kind = config.get("model_type")
    for name in STACK_NAMES:
        if getattr(settings, name) is not None and name not in stacks:
            available = " and ".join(stacks)
            errors.append(
                error_message(
                    "unknown-stack",
                    f"a {kind} model has no such stack; it has {available}.{did_you_mean(name, stacks)}",
                    setting=name,
                )
            )
    counts = {
        name: count for name, stack in stacks.items() if (count := stack.num_layers(config)) is not None
    }
    for name, choice in kept_layers(settings, counts).items():
        error = _layers_error(family, settings, choice, counts[name])
        if error:
            setting = name if getattr(settings, name) is not None else "importance"
            errors.append(error_message(error.code, error.message, setting=setting))
        count = choice if isinstance(choice, int) else len(choice)
        set_config_value(result_config, stacks[name].num_layers_key, count)
    return errors, result_config


def check_parts(settings: Any, config: Mapping[str, Any]) -> list[Message]:
    """Return the errors, each with its setting, for parts that the layers of this config lack."""
    family = find_family(config)
    if family is None:
        return []
    stacks = {stack.name: stack for stack in family.stacks(config)}
    kind = config.get("model_type")
    errors = check_part_kinds(settings.parts, config, "targets")
    for name in STACK_NAMES:
        choice = getattr(settings, name)
        if choice is None:
            continue
        if name not in stacks:
            available = " and ".join(stacks)
            errors.append(
                error_message(
                    "unknown-stack",
                    f"{with_article(str(kind))} model has no such stack; it has"
                    f" {available}.{did_you_mean(name, stacks)}",
                    setting=name,
                )
            )
            continue
        count = stacks[name].num_layers(config)
        kinds = [part for part in settings.parts if part != "cross-attention" or name == "decoder_layers"]
        error = None if count is None else _parts_error(choice, count, len(kinds))
        if error:
            errors.append(error_message(error.code, error.message, setting=name))
    return errors


def check_part_kinds(kinds: Sequence[str], config: Mapping[str, Any], setting: str) -> list[Message]:
    """Return the errors if the layers of a model of this config lack some of these kinds of parts.

    setting: the setting with the kinds.
    """
    family = find_family(config)
    if family is None or family.architecture == "seq2seq" or "cross-attention" not in kinds:
        return []
    return [
        error_message(
            "unknown-part",
            f"{with_article(str(config.get('model_type')))} model has no cross-attention; it has attention"
            " and"
            " ffn.",
            setting=setting,
        )
    ]


def _parts_error(choice: int | list[int], layers: int, kinds: int) -> Message | None:
    """Return the error in the parts to keep of a stack with this many whole layers, else None."""
    if not kinds:  # an encoder has no cross-attention
        return error_message("unknown-part", "the encoder has no cross-attention; remove this setting.")
    if isinstance(choice, list):
        return None if _is_increasing(choice, layers) else _not_increasing_error(choice, layers)
    if choice > kinds * layers:
        return error_message(
            "more-than-model-has",
            f"cannot keep {choice} parts, because there are only {kinds * layers}. Lower the number.",
        )
    if choice < kinds:
        return error_message(
            "too-few-kept", f"{choice} is too few; one part of each kind must be kept, so at least {kinds}."
        )
    return None


def _is_increasing(numbers: list[int], below: int) -> bool:
    return sorted(set(numbers)) == numbers and all(0 <= number < below for number in numbers)


def _not_increasing_error(numbers: list[int], below: int) -> Message:
    return error_message(
        "wrong-layer-numbers", f"expected increasing layer indices from 0 to {below - 1}, got {numbers}."
    )


def _layers_error(family: Family, settings: Any, choice: int | list[int], count: int) -> Message | None:
    """Return the error in the layers of one stack, else None."""
    if isinstance(choice, int):
        if choice > count:
            return error_message(
                "more-than-model-has",
                f"cannot keep {choice} layers, because there are only {count}. Lower the number.",
            )
        drops_first = settings.importance == "last" and choice < count
    else:
        if not _is_increasing(choice, count):
            return _not_increasing_error(choice, count)
        drops_first = 0 not in choice
    if drops_first and family.first_layer_reason is not None:
        return error_message(
            "first-layer-required",
            f"the first layer of a {family.name} model must be kept: {family.first_layer_reason}.",
        )
    return None
