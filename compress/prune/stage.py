"""The stage `prune`: structured pruning of heads, neurons, hidden width and convolution channels."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from smelt.compress.drop_layers.settings import LAYERS_AFTER_PARTS_ERROR
from smelt.compress.model_input import codebook_error, split_pruning_error
from smelt.compress.prune.importances.registry import IMPORTANCES
from smelt.compress.prune.settings import (
    PruneSettings,
    check_length,
    check_towers,
    check_units,
    fixed_width_errors,
    least_parameters,
    narrowed_config,
    obs_bytes,
)
from smelt.core.artifact import Artifact
from smelt.core.messages import Message, error_message
from smelt.data.splits import Split, missing_labels_errors
from smelt.data.tasks import Task
from smelt.models.model_size import (
    FLOAT_BYTES,
    STATISTICS_MEMORY_BYTES,
    ModelSize,
    SizeInputs,
    StepSize,
    one_shot_size,
)
from smelt.quantization.schemes.registry import STATIC_SCHEME
from smelt.stage import Context, Need, QuantizedInput, Settings, Stage


class Prune(Stage[PruneSettings]):
    """Remove the least important heads, neurons or channels of each layer.

    They are removed physically, with all coupled weights: rows of query, key and value and columns
    of the output projection; rows of the first feed-forward layer (and the gate) and columns of the
    second. T5's position bias is one table for all layers; after pruning each layer has its own.
    `importance` chooses how units are scored: by default gradient times value (taylor), with a budget
    by optimal brain surgeon (obs), for width by activations. Quality drops at once; follow with distill
    (or finetune) to recover it. Removing neurons usually costs less quality than removing heads. With a
    budget (parameters, flops, measured latency), heads and neurons of all
    layers compete by importance per cost; with `layers` and `width` among the targets, the loss of
    candidates chooses how many layers and channels of the hidden states are removed too.
    `targets: [width]` prunes these channels alone, `targets: [channels]` those between the
    convolutions of a ResNet's blocks, with their batch norms.
    After `quantize`, the remaining quantized weights and scales are kept.

        - prune: {targets: [ffn], keep_ratio: 0.5, importance: taylor}
        - prune: {budget: {latency: 0.6, sequence_length: 32}}
        - prune: {targets: [layers, width, heads, ffn], budget: {parameters: 0.5}}
        - prune: {targets: [width], keep_ratio: 0.75}
        - prune: {targets: [channels], keep_ratio: 0.5}
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "prune"
    may_need: ClassVar[frozenset[Need]] = frozenset({"train", "calibration"})
    source: ClassVar[str] = (
        "; ".join(f"{i.name}: {i.source}" for i in IMPORTANCES.values() if i.source)
        + "; scope global: Molchanov et al. 2017, arXiv:1611.06440; budgets of latency: HALP, Shen et al."
        " 2021, arXiv:2110.10811, ZipLM, Kurtic et al. 2023, arXiv:2302.04089; layers and width within a"
        " budget: Minitron, Muralidharan et al. 2024, arXiv:2407.14679"
    )
    version: ClassVar[int] = 11
    prunes_units: ClassVar[bool] = True
    changes_quantized_weights: ClassVar[bool] = True
    settings_type: ClassVar[type[PruneSettings]] = PruneSettings

    @classmethod
    def provides(cls, settings: PruneSettings) -> frozenset[str]:
        """Return the properties that later steps may not support: layers of different widths."""
        uneven = settings.budget is not None or settings.scope == "global"
        return frozenset({"widths"} if uneven else ())

    @classmethod
    def invalidates(cls, settings: PruneSettings) -> Mapping[str, str]:
        """Return the results of earlier steps that this step destroys: n:m sparsity patterns."""
        text = "removing inputs shifts their neighbors, and the n:m pattern of '{step}' no longer holds"
        invalidated = {"pattern": f"{text}; prune before '{{step}}'"}
        return invalidated | ({"parts": LAYERS_AFTER_PARTS_ERROR} if "layers" in settings.targets else {})

    @classmethod
    def quantized_input_error(cls, settings: PruneSettings, quantized: QuantizedInput) -> str | None:
        """Return why units of a quantized model cannot be removed, and what to do; None where they can."""
        if settings.searches_shape:
            return (
                "layers and width of a quantized model are not removed within a budget. Prune before"
                " quantizing:"
                f" `- prune: {{targets: [{', '.join(settings.targets)}], budget: ...}}`, `- quantize: {{}}`."
            )
        if "channels" in settings.targets:
            chain = f"`- prune: {{targets: [channels]}}`, `- quantize: {{scheme: {STATIC_SCHEME}}}`"
            return f"channels can only be removed from float convolutions. Prune before quantizing: {chain}."
        return split_pruning_error(quantized, cls.name) or codebook_error(quantized, cls.name)

    @classmethod
    def poor_order(cls, settings: PruneSettings, earlier: Mapping[str, Settings]) -> str | None:
        """Return that units of factorized layers are not removed."""
        if "factorize" not in earlier:
            return None
        return "After factorize only few layers can be pruned. Put prune before factorize."

    @classmethod
    def needs_with(cls, settings: PruneSettings, available: Collection[str] = ()) -> frozenset[Need]:
        """Return the data that the settings need: calibration data if available, else train.

        Reconstruction uses samples if there are any. It only requires them if it is set explicitly.
        """
        by_weights = IMPORTANCES[settings.importance].needs == "weights" and not settings.searches_shape
        if "channels" in settings.targets and by_weights:
            return frozenset()
        explicit = settings.reconstruct and "reconstruct" in settings.model_fields_set
        needs_none = by_weights and not explicit
        if needs_none and not (settings.reconstruct and {"calibration", "train"} & set(available)):
            return frozenset()
        return frozenset({"calibration"} if "calibration" in available else {"train"})

    @classmethod
    def check_rows(cls, settings: PruneSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
        """Return errors about the data: the loss of a sentence embedder needs similarity scores."""
        if errors := fixed_width_errors(task, settings.targets, "targets"):
            return errors
        names = ("calibration",) if "calibration" in data else ("train",)
        if settings.searches_shape:
            return missing_labels_errors(task, data, names)
        if IMPORTANCES[settings.importance].needs != "labels":
            return []
        return missing_labels_errors(task, data, names, instead=("importance", "magnitude"))

    @classmethod
    def check_model(
        cls, settings: PruneSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the settings that do not fit a model of this config, and the config of the result."""
        length = settings.budget.sequence_length if settings.budget is not None else None
        errors = check_units(settings.targets, config) or check_towers(settings, config)
        errors = errors or check_length(length, config)
        return errors, config if errors else narrowed_config(settings, config)

    @classmethod
    def check_size(cls, settings: PruneSettings, size: ModelSize) -> list[Message]:
        """Return the error if the smallest shape of a model of this size exceeds a budget of parameters."""
        budget = settings.budget
        if budget is None or budget.parameters is None or "width" in settings.targets:
            return []
        least = least_parameters(settings, size) / size.parameters
        if least <= budget.parameters:
            return []
        text = (
            f"{budget.parameters:g} of the model's parameters cannot be reached: with the fewest"
            f" {', '.join(settings.targets)} at least {math.ceil(1000 * least) / 1000:g} of them remain. Set"
            " more, or add targets, or remove tokens (trim-vocabulary)."
        )
        return [error_message("budget-too-small", text, setting="budget.parameters")]

    @classmethod
    def estimate_size(cls, settings: PruneSettings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step: also gradients of all weights, or the matrices of obs.

        Candidates of a search are copies of the model.
        """
        method = IMPORTANCES[settings.importance]
        scores_all = settings.scope == "global" or settings.budget is not None
        streamed = method.is_local and not scores_all and not inputs.is_gpu
        uses_samples = method.needs != "weights" or settings.reconstruct
        samples = settings.calibration_samples if uses_samples else 1
        keep_ratios = {target: settings.keep_ratio_of(target) for target in settings.targets}
        result = inputs.result.with_units(keep_ratios.get("heads", 1.0), keep_ratios.get("ffn", 1.0))
        if settings.budget is not None and settings.budget.measure == "parameters":
            result = inputs.source.scaled_to(settings.budget.keep_ratio)
        is_obs = settings.importance == "obs"
        has_gradients = method.needs == "labels" and not is_obs
        more_bytes = FLOAT_BYTES * inputs.source.parameters * (has_gradients + 4 * settings.searches_shape)
        curvatures, moments = obs_bytes(inputs.source) if is_obs else (0, 0)
        on_disk = moments if moments > STATISTICS_MEMORY_BYTES else 0
        more_bytes += curvatures + moments - on_disk
        size = one_shot_size(inputs, result=result, more_bytes=more_bytes, streamed=streamed, samples=samples)
        return replace(size, temporary_bytes=on_disk)

    @classmethod
    def lighter_settings(cls, settings: PruneSettings) -> Iterator[tuple[str, PruneSettings]]:
        """Yield settings that may need less memory, with their text: importance without gradients."""
        if settings.budget is None and settings.importance != "magnitude" and "width" not in settings.targets:
            yield (
                "importance: magnitude",
                settings.model_copy(update={"importance": "magnitude", "scope": "layer"}),
            )

    def __call__(self, src: Artifact, settings: PruneSettings, ctx: Context) -> None:
        """Score and prune the units of `src`, and write the smaller model to `ctx.out`."""
        from smelt.runtimes.device import torch_threads

        with torch_threads(ctx.threads):
            if settings.searches_shape:
                from smelt.compress.prune.shape_search import prune_to_shape

                prune_to_shape(src, settings, ctx)
            elif "width" in settings.targets:
                from smelt.compress.prune.width import prune_width

                prune_width(src, settings, ctx)
            elif "channels" in settings.targets:
                from smelt.compress.prune.channels import prune_channels

                prune_channels(src, settings, ctx)
            else:
                from smelt.compress.prune.heads_and_neurons import prune_heads_and_neurons

                prune_heads_and_neurons(src, settings, ctx)
