"""The stage `prune`: structured pruning of heads, neurons, hidden width and convolution channels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.model_input import split_pruning_error
from smelt.compress.prune.importances.registry import IMPORTANCES
from smelt.compress.prune.settings import (
    PruneSettings,
    check_length,
    check_units,
    fixed_heads_warnings,
    fixed_width_errors,
    narrowed_config,
)
from smelt.core.artifact import Artifact
from smelt.core.messages import Message
from smelt.data.splits import Split, missing_labels_errors
from smelt.data.tasks import Task
from smelt.models.model_size import FLOAT_BYTES, SizeInputs, StepSize, one_shot_size
from smelt.quantization.schemes.registry import STATIC_SCHEME
from smelt.stage import Context, Need, QuantizedInput, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from smelt.compress.prune.budget import BudgetAllocation
    from smelt.compress.prune.importances.scores import Groups, UnitScores
    from smelt.compress.prune.reconstruct import UnitSelection
    from smelt.compress.prune.units import AttentionGroup, FeedForwardGroup
    from smelt.models.streamed_model import StreamedModel


class Prune(Stage[PruneSettings]):
    """Remove the least important heads, neurons or channels of each layer.

    They are removed physically, with all coupled weights: rows of query, key and value and columns
    of the output projection; rows of the first feed-forward layer (and the gate) and columns of the
    second. T5's position bias is one table for all layers; after pruning each layer has its own.
    `importance` chooses how units are scored: by default gradient times value (taylor), with a budget
    by optimal brain surgeon (obs), for width by activations. Quality drops at once; follow with distill
    (or finetune) to recover it. Removing neurons usually costs less quality than removing heads. With a
    budget (parameters, flops, measured latency), heads and neurons of all
    layers compete by importance per cost. `targets: [width]` prunes channels of the hidden states,
    `targets: [channels]` those between the convolutions of a ResNet's blocks, with their batch norms.
    After `quantize`, the remaining quantized weights and scales are kept.

        - prune: {targets: [ffn], keep_ratio: 0.5, importance: taylor}
        - prune: {budget: {latency: 0.6, sequence_length: 32}}
        - prune: {targets: [width], keep_ratio: 0.75}
        - prune: {targets: [channels], keep_ratio: 0.5}
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "prune"
    may_need: ClassVar[frozenset[Need]] = frozenset({"train", "calibration"})
    source: ClassVar[str] = (
        "; ".join(f"{i.name}: {i.source}" for i in IMPORTANCES.values() if i.source)
        + "; scope global: Molchanov et al. 2017, arXiv:1611.06440; budgets of latency: HALP, Shen et al."
        " 2021, arXiv:2110.10811, ZipLM, Kurtic et al. 2023, arXiv:2302.04089"
    )
    version: ClassVar[int] = 8
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
        return {"pattern": f"{text}; prune before '{{step}}'"}

    @classmethod
    def quantized_input_error(cls, settings: PruneSettings, quantized: QuantizedInput) -> str | None:
        """Return why units of a quantized model cannot be removed, and what to do; None where they can."""
        if "channels" in settings.targets:
            chain = f"`- prune: {{targets: [channels]}}`, `- quantize: {{scheme: {STATIC_SCHEME}}}`"
            return f"channels can only be removed from float convolutions. Prune before quantizing: {chain}."
        return split_pruning_error(quantized, cls.name)

    @classmethod
    def poor_order(cls, settings: PruneSettings, earlier: Collection[str]) -> str | None:
        """Return that units of factorized layers are not removed."""
        if "factorize" not in earlier:
            return None
        return "After factorize only few layers can be pruned. Put prune before factorize."

    @classmethod
    def needs_with(cls, settings: PruneSettings, available: Collection[str] = ()) -> frozenset[Need]:
        """Return the data that the settings need: calibration data if available, else train.

        Reconstruction uses samples if there are any. It only requires them if it is set explicitly.
        """
        by_weights = IMPORTANCES[settings.importance].needs == "weights"
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
        if IMPORTANCES[settings.importance].needs != "labels":
            return []
        names = ("calibration",) if "calibration" in data else ("train",)
        return missing_labels_errors(task, data, names, instead=("importance", "magnitude"))

    @classmethod
    def check_model(
        cls, settings: PruneSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return the settings that do not fit a model of this config, and the config of the result."""
        length = settings.budget.sequence_length if settings.budget is not None else None
        errors = check_units(settings.targets, config) or check_length(length, config)
        return errors, config if errors else narrowed_config(settings, config)

    @classmethod
    def estimate_size(cls, settings: PruneSettings, inputs: SizeInputs) -> StepSize:
        """Return the estimated sizes of the step: gradients of all weights, if the importance needs them."""
        method = IMPORTANCES[settings.importance]
        scores_all = settings.scope == "global" or settings.budget is not None
        streamed = method.is_local and not scores_all and not inputs.is_gpu
        uses_samples = method.needs != "weights" or settings.reconstruct
        samples = settings.calibration_samples if uses_samples else 1
        keep_ratios = {target: settings.keep_ratio_of(target) for target in settings.targets}
        result = inputs.result.with_units(keep_ratios.get("heads", 1.0), keep_ratios.get("ffn", 1.0))
        if settings.budget is not None and settings.budget.measure == "parameters":
            result = inputs.result.scaled_blocks(settings.budget.keep_ratio)
        gradients = FLOAT_BYTES * inputs.source.parameters * (method.needs == "labels")
        return one_shot_size(inputs, result=result, more_bytes=gradients, streamed=streamed, samples=samples)

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
            if "width" in settings.targets:
                from smelt.compress.prune.width import prune_width

                prune_width(src, settings, ctx)
            elif "channels" in settings.targets:
                from smelt.compress.prune.channels import prune_channels

                prune_channels(src, settings, ctx)
            else:
                self._prune(src, settings, ctx)

    def _prune(self, src: Artifact, settings: PruneSettings, ctx: Context) -> None:
        from smelt.compress.prune.importances.scores import ScoredModel
        from smelt.compress.prune.reconstruct import cut_units, load_reconstruction_samples
        from smelt.compress.prune.units import find_groups, rounding_warnings, update_config
        from smelt.models.checkpoint import count_stored_parameters, load_model, save_model

        streamed, codes = _open_streamed(src, settings, ctx), None
        model, edits = (streamed.model, streamed.edits) if streamed else load_model(src.path)
        if any(edit["op"] == "quantize" for edit in edits):
            from smelt.compress.quantize.requantize import dequantize_model

            edits, codes = dequantize_model(model, edits, src, ctx, self.name)
        parameters_before = count_stored_parameters(model)
        attentions, blocks = find_groups(model)
        ctx.warnings.extend(fixed_heads_warnings(settings.targets, model.config.to_dict()))
        attentions = attentions if "heads" in settings.targets else []
        blocks = blocks if "ffn" in settings.targets else []
        score = partial(
            IMPORTANCES[settings.importance].scorer("heads"), ScoredModel(model, src, settings, ctx)
        )
        scores = score((attentions, blocks)) if streamed is None else None
        if settings.scope == "layer" and settings.budget is None:
            ctx.warnings.extend(rounding_warnings(model, attentions, blocks, settings))
        allocation = _allocate_budget(model, [*attentions, *blocks], scores, src, settings, ctx)
        kept_counts = (
            allocation.kept if allocation else _unit_counts(model, attentions, blocks, scores, settings)
        )
        selection = _select_units(model, attentions, blocks, scores, score, kept_counts)
        samples = load_reconstruction_samples(model, src, settings, ctx) if selection else None
        ctx.details["reconstruction_error"] = cut_units(
            model, edits, selection, samples, ctx, streamed, codes
        )
        edits = update_config(model, edits)
        ctx.details["kept_heads"] = {g.name: g.count(model) for g in attentions}
        ctx.details["kept_neurons"] = {b.name: b.count(model) for b in blocks}
        ctx.details["parameters_before"] = parameters_before
        ctx.details["parameters_after"] = count_stored_parameters(model)
        if allocation:
            ctx.details["budget"] = allocation.details(model)
        if codes is not None:
            edits = codes.requantize(model, edits, ctx)
        if streamed is None:
            ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))
            if codes is not None:
                codes.write_master_weights(model, ctx)
        else:
            ctx.warnings.extend(streamed.finish(edits))


def _select_units(
    model: Any,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
    scores: UnitScores | None,
    score: Callable[[Groups], UnitScores],
    num_kept: Mapping[str, int],
) -> UnitSelection:
    """Return each group that loses units, with a function that returns its kept units.

    Without `scores` a group is scored by `score` when it is cut, because only then are the weights of a large
    model in memory. kept: the number of kept units by group name.
    """

    def kept_heads(group: AttentionGroup) -> Tensor:
        group_scores = (scores or score(([group], []))).heads[group.name]
        return group_scores.topk(num_kept[group.name]).indices.sort().values

    def kept_neurons(block: FeedForwardGroup) -> Tensor:
        group_scores = (scores or score(([], [block]))).neurons[block.name]
        return group_scores.topk(num_kept[block.name]).indices.sort().values

    selection: list[tuple[AttentionGroup | FeedForwardGroup, Callable[[], Tensor]]] = []
    selection += [(group, partial(kept_heads, group)) for group in attentions]
    selection += [(block, partial(kept_neurons, block)) for block in blocks]
    return [(group, select) for group, select in selection if num_kept[group.name] < group.count(model)]


def _open_streamed(src: Artifact, settings: PruneSettings, ctx: Context) -> StreamedModel | None:
    """Return a large model to be pruned block by block; None where the whole model has to be loaded.

    Gradients and comparisons across layers need the whole model. So does a relative position bias that all
    blocks of a stack share, because each block gets its own when heads are removed.
    """
    from smelt.core.files import read_json_object
    from smelt.models.families.registry import find_family
    from smelt.models.streamed_model import open_streamed
    from smelt.runtimes.device import torch_device

    is_local = IMPORTANCES[settings.importance].is_local
    is_layerwise = is_local and settings.scope == "layer" and settings.budget is None
    if not is_layerwise or torch_device(ctx.device) != "cpu":
        return None
    family = find_family(read_json_object(src.path / "config.json"))
    if family is not None and family.relative_bias is not None and "heads" in settings.targets:
        return None
    return open_streamed(src.path, ctx.out, settings.dtype)


def _allocate_budget(
    model: Any,
    groups: list[AttentionGroup | FeedForwardGroup],
    scores: UnitScores | None,
    src: Artifact,
    settings: PruneSettings,
    ctx: Context,
) -> BudgetAllocation | None:
    """Return the allocation of the budget; None without a budget or without prunable groups."""
    if settings.budget is None or not groups:
        return None
    from smelt.compress.prune.budget import BudgetAllocation

    return BudgetAllocation(model, groups, scores, src, settings, ctx)


def _unit_counts(
    model: Any,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
    scores: UnitScores | None,
    settings: PruneSettings,
) -> dict[str, int]:
    """Return the number of kept units by group name, from `keep_ratio`."""
    from smelt.compress.prune.units import count_kept_heads, count_kept_neurons

    if settings.scope == "global" and scores is not None:
        from smelt.compress.prune.units import allocate_globally

        normalized = scores.normalized()
        heads = (
            allocate_globally(normalized.heads, settings.keep_ratio_of("heads"), 1)
            if "heads" in settings.targets
            else {}
        )
        if "ffn" not in settings.targets:
            return heads
        return heads | allocate_globally(
            normalized.neurons, settings.keep_ratio_of("ffn"), settings.multiple_of
        )
    heads = {g.name: count_kept_heads(g.count(model), settings) for g in attentions}
    return heads | {b.name: count_kept_neurons(b.count(model), settings) for b in blocks}
