"""The stage `drop-layers`: remove whole layers, or parts of layers, that change the outputs least."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.drop_layers.settings import (
    LAYERS_AFTER_PARTS_ERROR,
    DropLayersSettings,
    LayerChoice,
    check_layer_counts,
    kept_fraction,
    kept_layers,
)
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.messages import Message, warning
from smelt.data.splits import Split, missing_labels_errors
from smelt.data.tasks import Task
from smelt.models.families.layout import STACK_NAMES
from smelt.models.families.registry import FAMILIES, family_of
from smelt.models.model_size import SizeInputs, StepSize, count_parameters, one_shot_size
from smelt.stage import Context, Need, Settings, Stage

if TYPE_CHECKING:
    from smelt.models.families.layout import Stack
    from smelt.models.streamed_model import StreamedModel

_CALIBRATED = ("block-influence", "loss")


class DropLayers(Stage[DropLayersSettings]):
    """Remove whole layers, or parts of layers.

    Those that change the outputs least are removed. Saves time and size in proportion to the
    removed layers; the Hugging Face config is updated. `loss` removes one layer at a time, the
    one with the smallest loss on calibration samples without it; each trial costs a pass over the
    samples from that layer on. `block-influence` costs one pass in all: 1 - mean cos(states in,
    states out) of a layer; it was published for deep pre-norm models. A removed decoder layer
    saves time in every generation step, an encoder layer once per sample. With `targets`, single
    attention or feed-forward parts are removed, and only their residual connection is kept.
    Quality falls at once; add distill (or finetune).

        - drop-layers: {keep_ratio: 0.5}
        - drop-layers: {decoder_layers: 1, importance: block-influence}
        - drop-layers: {targets: [attention, ffn], keep_ratio: 0.75}
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "drop-layers"
    may_need: ClassVar[frozenset[Need]] = frozenset({"train", "calibration"})
    source: ClassVar[str] = (
        "block influence: ShortGPT, Men et al. 2024, arXiv:2403.03853; of parts: He et al. 2024,"
        " arXiv:2406.15786; uniform, first, last: Shleifer & Rush 2020, arXiv:2010.13002, Sajjad et al."
        " 2020, arXiv:2004.03844"
    )
    version: ClassVar[int] = 2
    settings_type: ClassVar[type[DropLayersSettings]] = DropLayersSettings

    @classmethod
    def provides(cls, settings: DropLayersSettings) -> frozenset[str]:
        """Return what later steps may lose: layers with all their parts."""
        return frozenset({"parts"} if settings.parts else ())

    @classmethod
    def invalidates(cls, settings: DropLayersSettings) -> Mapping[str, str]:
        """Return what this step loses of earlier steps: the training of the removed layers."""
        invalidated = {
            "training": "removed layers lose part of what '{step}' trained, and no later step trains"
            " the model; add a finetune or distill after this step"
        }
        return invalidated if settings.parts else invalidated | {"parts": LAYERS_AFTER_PARTS_ERROR}

    @classmethod
    def poor_order(cls, settings: DropLayersSettings, earlier: Mapping[str, Settings]) -> str | None:
        """Return that the work of earlier stages on the removed layers is lost."""
        stages = " and ".join(sorted({"prune", "factorize"} & set(earlier)))
        return (
            f"Removing layers after {stages} discards part of that work. Put drop-layers first."
            if stages
            else None
        )

    @classmethod
    def needs_with(cls, settings: DropLayersSettings, available: Collection[str] = ()) -> frozenset[Need]:
        """Return the data that the step needs: calibration data, else training data, for some importances."""
        if settings.importance not in _CALIBRATED:
            return frozenset()
        return frozenset({"calibration"} if "calibration" in available else {"train"})

    @classmethod
    def check_rows(cls, settings: DropLayersSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
        """Return the errors for these samples: the loss of a sentence embedder needs scores."""
        if settings.importance != "loss":
            return []
        names = ("calibration",) if "calibration" in data else ("train",)
        return missing_labels_errors(task, data, names, instead=("importance", "block-influence"))

    @classmethod
    def check_model(
        cls, settings: DropLayersSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the errors, by setting, for a model of this config, and the config of the result."""
        return check_layer_counts(settings, config)

    @classmethod
    def estimate_size(cls, settings: DropLayersSettings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step; `loss` tries every layer for each that is removed."""
        samples = settings.calibration_samples if settings.importance in _CALIBRATED else 1
        tried = inputs.source.layers if settings.importance == "loss" else 1
        by_block = settings.importance != "loss" and not inputs.is_gpu
        return one_shot_size(inputs, streamed=by_block, samples=samples * tried)

    @classmethod
    def lighter_settings(cls, settings: DropLayersSettings) -> Iterator[tuple[str, DropLayersSettings]]:
        """Yield settings that need less memory, with their text: block influence runs block by block."""
        if settings.importance == "loss":
            changed = settings.model_copy(update={"importance": "block-influence"})
            yield "importance: block-influence", changed

    def __call__(self, src: Artifact, settings: DropLayersSettings, ctx: Context) -> None:
        """Select the layers of `src` to remove, remove them, and write the model to `ctx.out`."""
        from smelt.compress.drop_layers.layer_selection import keep_layers
        from smelt.models.checkpoint import load_model, save_model
        from smelt.runtimes.device import torch_threads

        with torch_threads(ctx.threads):
            streamed = _open_large_model(src, settings, ctx)
            model, edits = (streamed.model, streamed.edits) if streamed else load_model(src.path)
            stacks = _stacks_to_shorten(model, settings)
            if settings.parts:
                from smelt.compress.drop_layers.drop_parts import drop_parts

                drop_parts(model, streamed, edits, src, settings, ctx)
            else:
                layers_by_stack = _select_layers(model, streamed, stacks, src, settings, ctx)
                for stack in stacks:
                    edits, _ = keep_layers(
                        model, edits, stack.name, layers_by_stack[stack.name], "first", stage=self.name
                    )
                ctx.details["kept_layers"] = layers_by_stack
            if streamed:
                streamed.copy_blocks()
                ctx.warnings.extend(streamed.finish(edits))
            else:
                ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))
            ctx.details["parameters_before"] = count_parameters(src.path)
            ctx.details["parameters_after"] = count_parameters(ctx.out)


def _open_large_model(src: Artifact, settings: DropLayersSettings, ctx: Context) -> StreamedModel | None:
    """Return a large model to be processed block by block; None if it has to be loaded whole."""
    from smelt.models.streamed_model import open_streamed
    from smelt.runtimes.device import torch_device

    if settings.importance == "loss" or torch_device(ctx.device) != "cpu":
        return None
    return open_streamed(src.path, ctx.out, settings.dtype)


def _stacks_to_shorten(model: Any, settings: DropLayersSettings) -> list[Stack]:
    """Return the stacks of `model`.

    Raises:
        InputError: an unsupported family, or layers that it does not have.
    """
    family, config = family_of(model), model.config.to_dict()
    if family is None:
        raise InputError(
            f"drop-layers: {model.config.model_type} models are not supported."
            f" Supported: {', '.join(FAMILIES)}.",
            code="unsupported-family",
        )
    errors, _ = check_layer_counts(settings, config)
    if errors:
        raise InputError(
            "drop-layers: " + " ".join(f"{error.setting or ''}: {error.message}" for error in errors),
            code=errors[0].code,
            messages=errors,
        )
    return list(family.stacks(config))


def _select_layers(
    model: Any,
    streamed: StreamedModel | None,
    stacks: list[Stack],
    src: Artifact,
    settings: DropLayersSettings,
    ctx: Context,
) -> dict[str, list[int]]:
    """Return the indices of the layers to keep by stack; report the importance in the details."""
    from smelt.compress.drop_layers.select_layers import select_by_influence, select_by_loss

    counts = {stack.name: len(stack.modules(model)) for stack in stacks}
    requested = kept_layers(settings, counts)
    ctx.warnings.extend(_nothing_removed_warnings(requested, counts, settings))
    selected = {name: choice for name, choice in requested.items() if isinstance(choice, list)}
    selected |= {name: list(range(count)) for name, count in counts.items() if requested[name] == count}
    num_kept = {name: c for name, c in requested.items() if isinstance(c, int) and name not in selected}
    if not num_kept:
        return selected
    if settings.importance in _CALIBRATED:
        if settings.importance == "loss":
            calibrated = select_by_loss(model, stacks, selected, num_kept, src, settings, ctx)
        else:
            calibrated = select_by_influence(model, streamed, stacks, num_kept, src, settings, ctx)
        ctx.warnings.extend(
            warning(
                "minimum-kept",
                f"{name}: {len(calibrated[name])} layers are kept instead of {count}: an earlier step"
                " removed parts of layers, and one part of each kind must be kept. Drop whole"
                " layers before parts of layers.",
            )
            for name, count in num_kept.items()
            if len(calibrated[name]) > count
        )
        return selected | calibrated
    return selected | {
        name: _select_by_position(count, counts[name], settings, ctx) for name, count in num_kept.items()
    }


def _nothing_removed_warnings(
    wanted: dict[str, LayerChoice], counts: dict[str, int], settings: DropLayersSettings
) -> list[Message]:
    """Return warnings where `keep_ratio` is below 1 and all layers are kept."""
    ratio = kept_fraction(settings)
    explicit = [name for name in STACK_NAMES if getattr(settings, name) is not None]
    unchanged = [name for name, choice in wanted.items() if choice == counts[name] and name not in explicit]
    if ratio == 1:
        return []
    return [
        warning(
            "nothing-to-remove",
            f"keep_ratio {ratio:g} of the {counts[name]} {name}, rounded to at least one, keeps all of them;"
            " none is removed. Lower keep_ratio.",
            setting="keep_ratio",
        )
        for name in unchanged
    ]


def _select_by_position(count: int, total: int, settings: DropLayersSettings, ctx: Context) -> list[int]:
    from smelt.compress.drop_layers.layer_selection import layers_to_copy

    if settings.importance == "random":
        return sorted(random.Random(ctx.seed).sample(range(total), count))
    return layers_to_copy(count, total, settings.importance)
