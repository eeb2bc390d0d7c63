"""Structured pruning: whole attention heads and feed-forward neurons go, and the model gets smaller."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.compress.behind_codes import CodesBefore
from smelt.compress.float_model import stored_parameters
from smelt.compress.prune.fit import OF_VECTORS, check_length, check_units, heads_that_stay, narrower
from smelt.compress.prune.settings import LOOK, ROWS, PruneSettings
from smelt.compress.train.run import scores_lacking
from smelt.core.artifact import Artifact, Format
from smelt.core.data import SIMILARITY, TASKS, Split, Task
from smelt.core.messages import Message, mistake
from smelt.core.stage import Context, Need
from smelt.runtime.schemes.registry import OBSERVING

if TYPE_CHECKING:
    from torch import Tensor

    from smelt.compress.prune.budget.within import Spent
    from smelt.compress.prune.compensate import Chosen
    from smelt.compress.prune.groups import AttentionGroup, FeedForwardGroup
    from smelt.compress.prune.importance.scores import Scores
    from smelt.runtime.models.streamed import StreamedModel


class Prune:
    """Remove the least important attention heads and feed-forward neurons of each layer.

    They are removed physically, with all that is coupled to them: rows of query, key, value and
    columns of the output product; rows of the first (and of the gate) and columns of the second
    feed-forward product. T5's position bias is one table for all layers: each gets its own, then.
    Importance is the first-order change of the loss on calibration rows. Quality falls at once;
    follow with distill (or finetune) to recover it. Neurons are cheaper to lose than heads. With a budget
    (parameters, flops, measured latency) heads and neurons of all layers compete, each by its
    importance for what it costs. `targets: [width]` takes channels of the hidden states instead, and
    `targets: [channels]` those between the convolutions of a ResNet's blocks, with their batch norms. Behind
    `quantize` codes and scales of what is left stay.

        - prune: {targets: [ffn], keep_ratio: 0.5, importance: taylor}
        - prune: {budget: {latency: 0.6, sequence_length: 32}}
        - prune: {targets: [width], keep_ratio: 0.75}
        - prune: {targets: [channels], keep_ratio: 0.5}
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "prune"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset({"train", "calibration"})
    source: ClassVar[str] = (
        "heads: Michel et al. 2019, arXiv:1905.10650; neurons: DynaBERT, Hou et al. 2020, arXiv:2004.04037,"
        " run_glue.py; fisher: Kwon et al. 2022, arXiv:2204.09656; global: Molchanov et al. 2017,"
        " arXiv:1611.06440; budgets of latency: HALP, Shen et al. 2021, arXiv:2110.10811, ZipLM, Kurtic et"
        " al. 2023, arXiv:2302.04089; width: Minitron, Muralidharan et al. 2024, arXiv:2407.14679; channels:"
        " Li et al. 2017, arXiv:1608.08710, Molchanov et al. 2019, arXiv:1906.10771"
    )
    version: ClassVar[int] = 5
    cuts_units: ClassVar[bool] = True
    settings_type: ClassVar[type[PruneSettings]] = PruneSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def leaves(cls, settings: PruneSettings) -> frozenset[str]:
        """Return what later steps cannot work with: layers that were cut by different amounts."""
        uneven = settings.budget is not None or settings.scope == "global"
        return frozenset({"widths"} if uneven else ())

    @classmethod
    def spoils(cls, settings: PruneSettings) -> Mapping[str, str]:
        """Return what is lost of the work of steps before it: inputs that go move their neighbours."""
        why = "inputs that go move their neighbours, and the n:m pattern of '{step}' no longer holds"
        return {"pattern": f"{why}; prune before '{{step}}'"}

    @classmethod
    def unfit_for_codes(cls, settings: PruneSettings, codes: CodesBefore) -> str | None:
        """Return why no unit can be taken from a quantized model, and what to do; None where it can."""
        if "channels" in settings.targets:
            chain = f"`- prune: {{targets: [channels]}}`, `- quantize: {{scheme: {OBSERVING}}}`"
            return f"channels go from convolutions of floats. Put it before the codes: {chain}."
        return codes.units_held(cls.name)

    @classmethod
    def needs_with(cls, settings: PruneSettings, given: Collection[str]) -> frozenset[Need]:
        """Return what it needs: taylor and fisher look at rows, those for calibration if there are any.

        Compensation takes the rows that there are; without these two it is left out where there are none,
        unless it was asked for by name.
        """
        if "channels" in settings.targets and settings.importance not in ROWS:
            return frozenset()
        asked = settings.reconstruct and "reconstruct" in settings.model_fields_set
        needs_none = settings.importance not in ROWS and not asked
        if needs_none and not (settings.reconstruct and {"calibration", "train"} & set(given)):
            return frozenset()
        return frozenset({"calibration"} if "calibration" in given else {"train"})

    @classmethod
    def check_rows(cls, settings: PruneSettings, task: Task, data: Mapping[str, Split]) -> list[Message]:
        """Return what does not fit the rows: the loss of a sentence embedder is made of scores."""
        if "width" in settings.targets and task == SIMILARITY:
            return [mistake("fixed-width", OF_VECTORS, setting="targets")]
        looks = settings.importance in LOOK
        found = scores_lacking(task, data, ("calibration",) if "calibration" in data else ("train",))
        return (
            [mistake(one.code, f"{one.message} Or take magnitude.", setting="importance") for one in found]
            if looks
            else []
        )

    @classmethod
    def check_model(
        cls, settings: PruneSettings, config: Mapping[str, Any]
    ) -> tuple[list[Message], Mapping[str, Any]]:
        """Return what does not fit a model of this config, by setting, and the config of the result."""
        length = settings.budget.sequence_length if settings.budget is not None else None
        mistakes = check_units(settings.targets, config) or check_length(length, config)
        return mistakes, config if mistakes else narrower(settings, config)

    def __call__(self, src: Artifact, settings: PruneSettings, ctx: Context) -> None:
        """Score the units of `src`, cut, and write the smaller model to `ctx.out`."""
        from smelt.compress.prune.channels import prune_channels
        from smelt.compress.prune.width.narrower import prune_width
        from smelt.compress.train.state import threads

        with threads(ctx.threads):
            if "width" in settings.targets:
                prune_width(src, settings, ctx)
            elif "channels" in settings.targets:
                prune_channels(src, settings, ctx)
            else:
                self._prune(src, settings, ctx)

    def _prune(self, src: Artifact, settings: PruneSettings, ctx: Context) -> None:
        from smelt.compress.prune.compensate import cut_units
        from smelt.compress.prune.counts import not_as_asked
        from smelt.compress.prune.cut import say_in_config
        from smelt.compress.prune.groups import find_groups
        from smelt.compress.prune.importance.of_units import score_units
        from smelt.compress.prune.rows_to_fit import rows_to_fit
        from smelt.compress.quantize.requantize import load_changeable
        from smelt.runtime.models.checkpoint import save_model

        streamed, codes = _streamed(src, settings, ctx), None
        if streamed is not None:
            model, edits = streamed.model, streamed.edits
        else:
            model, edits, codes = load_changeable(src, ctx, self.name)
        before = stored_parameters(model)
        attentions, blocks = find_groups(model)
        ctx.warnings.extend(heads_that_stay(settings.targets, model.config.to_dict()))
        attentions = attentions if "heads" in settings.targets else []
        blocks = blocks if "ffn" in settings.targets else []
        scores = None
        if streamed is None:
            scores = score_units(model, src, settings, ctx, attentions=attentions, blocks=blocks)
        if settings.scope == "layer" and settings.budget is None:
            ctx.warnings.extend(not_as_asked(model, attentions, blocks, settings))
        spent = _spent(model, [*attentions, *blocks], scores, src, settings, ctx)
        kept = spent.kept if spent else _counts(model, attentions, blocks, scores, settings)
        chosen = _chosen(model, attentions, blocks, scores, kept)
        rows = rows_to_fit(model, src, settings, ctx) if chosen else None
        ctx.details["reconstruction_error"] = cut_units(model, edits, chosen, rows, ctx, streamed, codes)
        edits = say_in_config(model, edits)
        ctx.details["kept_heads"] = {g.name: g.count(model) for g in attentions}
        ctx.details["kept_neurons"] = {b.name: b.count(model) for b in blocks}
        ctx.details["parameters_before"] = before
        ctx.details["parameters_after"] = stored_parameters(model)
        if spent:
            ctx.details["budget"] = spent.details(model)
        if codes is not None:
            edits = codes.put_back(model, edits, ctx)
        if streamed is None:
            ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))
            if codes is not None:
                codes.write_floats(model, ctx)
        else:
            ctx.warnings.extend(streamed.finish(edits))


def _chosen(
    model: Any,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
    scores: Scores | None,
    kept: Mapping[str, int],
) -> Chosen:
    """Return each group that loses units, and what says which stay; without `scores` the weights do.

    kept: by the name of a group how many of its units stay.

    The weights are looked at when the group is cut, which is when a large model has them in memory.
    """
    from smelt.compress.prune.importance.magnitude import magnitude_scores

    def stay_of_heads(group: AttentionGroup) -> Tensor:
        found = (scores or magnitude_scores(model, [group], [])).heads[group.name]
        return found.topk(kept[group.name]).indices.sort().values

    def stay_of_neurons(block: FeedForwardGroup) -> Tensor:
        found = (scores or magnitude_scores(model, [], [block])).neurons[block.name]
        return found.topk(kept[block.name]).indices.sort().values

    chosen: list[tuple[AttentionGroup | FeedForwardGroup, Callable[[], Tensor]]] = []
    chosen += [(group, partial(stay_of_heads, group)) for group in attentions]
    chosen += [(block, partial(stay_of_neurons, block)) for block in blocks]
    return [(group, stay) for group, stay in chosen if kept[group.name] < group.count(model)]


def _streamed(src: Artifact, settings: PruneSettings, ctx: Context) -> StreamedModel | None:
    """Return a large model to be taken block by block; gradients, and a choice among all, need it whole.

    So does a bias by distance that all blocks of a stack share: where heads go, each block gets its own.
    """
    from smelt.core.files import read_json
    from smelt.families.registry import find_family
    from smelt.runtime.backends.device import torch_device
    from smelt.runtime.models.streamed import open_streamed

    alone = settings.importance == "magnitude" and settings.scope == "layer" and settings.budget is None
    if not alone or torch_device(ctx.device) != "cpu":
        return None
    family = find_family(read_json(src.path / "config.json"))
    if family is not None and family.relative_bias is not None and "heads" in settings.targets:
        return None
    return open_streamed(src.path, ctx.out, settings.dtype)


def _spent(
    model: Any,
    groups: list[AttentionGroup | FeedForwardGroup],
    scores: Scores | None,
    src: Artifact,
    settings: PruneSettings,
    ctx: Context,
) -> Spent | None:
    """Return what a budget leaves; None where there is none, or nothing that could go."""
    if settings.budget is None or not groups:
        return None
    from smelt.compress.prune.budget.within import Spent

    return Spent(model, groups, scores, src, settings, ctx)


def _counts(
    model: Any,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
    scores: Scores | None,
    settings: PruneSettings,
) -> dict[str, int]:
    """Return by the name of a group how many of its units stay, where settings say a fraction."""
    from smelt.compress.prune.counts import heads_kept, neurons_kept

    if settings.scope == "global" and scores is not None:
        from smelt.compress.prune.across import kept_across

        among = scores.across_layers()
        heads = kept_across(among.heads, settings.ratio("heads"), 1) if "heads" in settings.targets else {}
        if "ffn" not in settings.targets:
            return heads
        return heads | kept_across(among.neurons, settings.ratio("ffn"), settings.multiple_of)
    heads = {g.name: heads_kept(g.count(model), settings) for g in attentions}
    return heads | {b.name: neurons_kept(b.count(model), settings) for b in blocks}
