"""Structured pruning: whole attention heads and feed-forward neurons go, and the model gets smaller."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from smelt.compress.float_model import load_float, stored_parameters
from smelt.compress.prune.fit import check_units, heads_that_stay
from smelt.compress.train.run import scores_lacking
from smelt.core.artifact import Artifact, Format
from smelt.core.data import TASKS, Split, Task
from smelt.core.stage import Context, Need, Settings, StoredDtype

if TYPE_CHECKING:
    from torch import Tensor

    from smelt.compress.calibration.rows import CalibrationRows
    from smelt.compress.prune.compensate import Chosen
    from smelt.compress.prune.groups import AttentionGroup, FeedForwardGroup
    from smelt.compress.prune.importance.scores import Scores
    from smelt.runtime.models.streamed import StreamedModel


_LOOK = ("taylor", "fisher")  # at the loss on rows


class PruneSettings(Settings):
    """Settings of `prune`. At least one head and one multiple of neurons stay in each layer.

    The number that stays is the nearest whole one; a half counts up.
    """

    what: list[Literal["heads", "ffn"]] = Field(
        default=["heads", "ffn"], min_length=1, description="attention heads, feed-forward neurons"
    )
    keep: float = Field(default=0.5, gt=0, le=1, description="fraction of units that stays")
    keep_heads: float | None = Field(default=None, gt=0, le=1, description="instead of keep, for heads")
    keep_ffn: float | None = Field(default=None, gt=0, le=1, description="instead of keep, for neurons")
    scope: Literal["layer", "global"] = Field(
        default="layer",
        description="layer: the same fraction stays in each; global: units of all layers compete, heads with"
        " heads and neurons with neurons",
    )
    importance: Literal["taylor", "fisher", "magnitude", "random"] = Field(
        default="taylor",
        description="taylor and fisher look at the loss on rows (slope; mean squared slope), magnitude at the"
        " weights alone; random: drawn by the seed, a control",
    )
    rows: int = Field(
        default=256,
        ge=1,
        description="rows that taylor, fisher and compensate look at (calibration, else train)",
    )
    batch_size: int = Field(default=16, ge=1, description="rows per batch that taylor looks at")
    compensate: bool = Field(
        default=True,
        description="refit what reads the units that stay, by least squares on rows; needs rows",
    )
    round_to: int = Field(default=8, ge=1, description="neurons that stay are a multiple of this")
    dtype: StoredDtype = "keep"

    @model_validator(mode="after")
    def _of_what_goes(self) -> Self:
        for kind in ("heads", "ffn"):
            if kind not in self.what and getattr(self, f"keep_{kind}") is not None:
                raise ValueError(f"keep_{kind} means nothing where what does not name {kind}")
        return self


class Prune:
    """Remove the least important attention heads and feed-forward neurons of each layer.

    They are removed physically, with all that is coupled to them: rows of query, key, value and
    columns of the output product; rows of the first (and of the gate) and columns of the second
    feed-forward product. T5's position bias is one table for all layers: each gets its own, then.
    Importance is the first-order change of the loss on calibration rows. Quality falls at once;
    follow with distill (or finetune) to recover it. Neurons are cheaper to lose than heads.

        - prune: {what: [ffn], keep: 0.5, importance: taylor}
        - distill: {epochs: 1}
    """

    name: ClassVar[str] = "prune"
    accepts: ClassVar[frozenset[Format]] = frozenset({"torch"})
    produces: ClassVar[Format] = "torch"
    needs: ClassVar[frozenset[Need]] = frozenset({"train", "calibration"})
    source: ClassVar[str] = (
        "heads: Michel et al. 2019, arXiv:1905.10650; neurons: DynaBERT, Hou et al. 2020, arXiv:2004.04037,"
        " run_glue.py; fisher: Kwon et al. 2022, arXiv:2204.09656; global: Molchanov et al. 2017,"
        " arXiv:1611.06440"
    )
    version: ClassVar[int] = 4
    needs_float: ClassVar[bool] = True
    settings_type: ClassVar[type[PruneSettings]] = PruneSettings
    tasks: ClassVar[frozenset[Task]] = frozenset(TASKS)

    @classmethod
    def needs_with(cls, settings: PruneSettings, given: Collection[str]) -> frozenset[Need]:
        """Return what it needs: taylor and fisher look at rows, those for calibration if there are any.

        Compensation takes the rows that there are; without these two it is left out where there are none,
        unless it was asked for by name.
        """
        asked = settings.compensate and "compensate" in settings.model_fields_set
        needs_none = settings.importance not in _LOOK and not asked
        if needs_none and not (settings.compensate and {"calibration", "train"} & set(given)):
            return frozenset()
        return frozenset({"calibration"} if "calibration" in given else {"train"})

    @classmethod
    def check_rows(
        cls, settings: PruneSettings, task: Task, data: Mapping[str, Split]
    ) -> list[tuple[str, str]]:
        """Return what does not fit the rows: the loss of a sentence embedder is made of scores."""
        looks = settings.importance in _LOOK
        found = scores_lacking(task, data, ("calibration",) if "calibration" in data else ("train",))
        return [("importance", f"{text} Or take magnitude.") for _, text in found] if looks else []

    @classmethod
    def check_model(
        cls, settings: PruneSettings, config: Mapping[str, Any]
    ) -> tuple[list[tuple[str, str]], Mapping[str, Any]]:
        """Return what does not fit a model of this config, by setting, and the config of the result."""
        return check_units(settings.what, config), config

    def __call__(self, src: Artifact, settings: PruneSettings, ctx: Context) -> None:
        """Score the units of `src`, cut, and write the smaller model to `ctx.out`."""
        from smelt.compress.train.state import threads

        with threads(ctx.threads):
            self._prune(src, settings, ctx)

    def _prune(self, src: Artifact, settings: PruneSettings, ctx: Context) -> None:
        from smelt.compress.prune.compensate import cut_units
        from smelt.compress.prune.cut import say_in_config
        from smelt.compress.prune.groups import find_groups
        from smelt.compress.prune.importance.of_units import score_units
        from smelt.runtime.models.checkpoint import save_model

        streamed = _streamed(src, settings, ctx)
        model, edits = (streamed.model, streamed.edits) if streamed else load_float(src, self.name)
        before = stored_parameters(model)
        attentions, blocks = find_groups(model)
        ctx.warnings.extend(heads_that_stay(settings.what, model.config.to_dict()))
        attentions = attentions if "heads" in settings.what else []
        blocks = blocks if "ffn" in settings.what else []
        scores = None
        if streamed is None:
            scores = score_units(model, src, settings, ctx, attentions=attentions, blocks=blocks)
        if settings.scope == "layer":
            ctx.warnings.extend(_nothing_to_cut(model, attentions, blocks, settings))
        chosen = _chosen(model, attentions, blocks, scores, settings)
        rows = _rows_to_fit(model, src, settings, ctx) if chosen else None
        ctx.facts["left_after_refit"] = cut_units(model, edits, chosen, rows, ctx, streamed)
        edits = say_in_config(model, edits)
        ctx.facts["kept_heads"] = {g.name: g.count(model) for g in attentions}
        ctx.facts["kept_neurons"] = {b.name: b.count(model) for b in blocks}
        ctx.facts["parameters_before"] = before
        ctx.facts["parameters_after"] = stored_parameters(model)
        if streamed is None:
            ctx.warnings.extend(save_model(model, edits, ctx.out, src.path, settings.dtype))
        else:
            ctx.warnings.extend(streamed.finish(edits))


def heads_kept(count: int, settings: PruneSettings) -> int:
    """Return how many of `count` heads stay: the nearest number, at least one."""
    return max(1, _nearest(count * (settings.keep_heads or settings.keep)))


def neurons_kept(count: int, settings: PruneSettings) -> int:
    """Return how many of `count` neurons stay: the nearest multiple of `round_to`, at least one multiple."""
    wanted = count * (settings.keep_ffn or settings.keep)
    return min(count, max(1, _nearest(wanted / settings.round_to)) * settings.round_to)


def _nearest(wanted: float) -> int:
    """Return the nearest whole number; of two that are equally near the larger one."""
    return math.floor(wanted + 0.5)


def _nothing_to_cut(
    model: Any, attentions: list[AttentionGroup], blocks: list[FeedForwardGroup], settings: PruneSettings
) -> list[str]:
    """Say where `keep` is below 1 and yet everything stays, because so few units cannot be divided so."""
    keep = {"heads": settings.keep_heads or settings.keep, "ffn": settings.keep_ffn or settings.keep}
    sizes = {
        "heads": [(n := g.count(model), heads_kept(n, settings)) for g in attentions],
        "ffn": [(n := b.count(model), neurons_kept(n, settings)) for b in blocks],
    }
    found = []
    for kind, counts in sizes.items():
        whole = sorted({count for count, kept in counts if kept == count})
        if keep[kind] == 1 or not whole:
            continue
        word = {"heads": "heads", "ffn": "neurons"}[kind]
        step = 1 if kind == "heads" else settings.round_to
        few = " or ".join(map(str, whole))
        most = max(whole)
        less = f" keep_{kind}: {(most - step) / most:.3g} takes {step} of {most}." if most > step else ""
        found.append(
            f"prune: keep {keep[kind]:g} of {few} {word}, rounded to a multiple of {step}, is all of them, so"
            f" nothing goes in {sum(kept == count for count, kept in counts)} of {len(counts)} layers.{less}"
        )
    return found


def _chosen(
    model: Any,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
    scores: Scores | None,
    settings: PruneSettings,
) -> Chosen:
    """Return each group that loses units, and what says which stay; without `scores` the weights do.

    The weights are looked at when the group is cut, which is when a large model has them in memory.
    """
    from smelt.compress.prune.importance.magnitude import magnitude_scores

    kept = _counts(model, attentions, blocks, scores, settings)

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

    alone = settings.importance == "magnitude" and settings.scope == "layer"
    if not alone or torch_device(ctx.device) != "cpu":
        return None
    family = find_family(read_json(src.path / "config.json"))
    if family is not None and family.relative_bias is not None and "heads" in settings.what:
        return None
    return open_streamed(src.path, ctx.out, settings.dtype)


def _counts(
    model: Any,
    attentions: list[AttentionGroup],
    blocks: list[FeedForwardGroup],
    scores: Scores | None,
    settings: PruneSettings,
) -> dict[str, int]:
    """Return by the name of a group how many of its units stay."""
    if settings.scope == "global" and scores is not None:
        from smelt.compress.prune.across import kept_across

        among = scores.across_layers()
        heads = kept_across(among.heads, settings.keep_heads or settings.keep, 1)
        return heads | kept_across(among.neurons, settings.keep_ffn or settings.keep, settings.round_to)
    heads = {g.name: heads_kept(g.count(model), settings) for g in attentions}
    return heads | {b.name: neurons_kept(b.count(model), settings) for b in blocks}


def _rows_to_fit(model: Any, src: Artifact, settings: PruneSettings, ctx: Context) -> CalibrationRows | None:
    """Return the rows that what stays is refitted on; None where it is to be cut alone."""
    from smelt.compress.calibration.rows import calibration_rows

    if not settings.compensate:
        return None
    split = ctx.data.get("calibration") or ctx.data.get("train")
    if split is None or not len(split):
        ctx.warnings.append(
            "prune: there are no rows, so what stays is not refitted (compensate) and quality falls further."
            " Name some with data: {calibration: FILE} or data: {train: FILE}; compensate: false says that"
            " it is meant."
        )
        return None
    return calibration_rows(model, src, settings.rows, ctx, "prune", padded=True)
