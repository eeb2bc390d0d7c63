"""The objective of a training as terms of a loss, and extensions of the shared training by a technique.

    train(model, src, settings, ctx, objective=..., extension=TrainingExtension(modules={"scores": scores}))

The loop, its checks and the selection of checkpoints are the same for every training; every part of an
extension is optional.

The gradient of an update is that of one batch with all its samples: a mean over all items, independent of
their division into batches. Terms of a loss are means over different items (labels of the decoder, tokens of
the encoder), so each names its items, and is weighted by its share of those.

The objective with the labels is `label_objective` of `smelt/training/losses.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from smelt.core.process_group import gather_parts
from smelt.stage import Context
from smelt.tasks.samples import IGNORE_INDEX, TOKEN_MASK_KEY, EncodedSample, TensorBatch
from smelt.training.training_state import autocast

# labels: see `count_items`. inputs: input tokens without padding (of an encoder, of a classifier).
AveragedOver = Literal["labels", "inputs"]
AVERAGED_OVER: tuple[AveragedOver, ...] = ("labels", "inputs")
TOTAL_LOSS = "loss"  # the name of a loss with a single term


@dataclass(frozen=True)
class LossTerm:
    """One summand of a loss.

    value: float32 scalar with a gradient: a mean over the batch's items, times its weight. averaged_over: the
    items. components: named summands of `value`, if it has several.
    """

    value: Tensor
    averaged_over: AveragedOver = "labels"
    components: Mapping[str, Tensor] = field(default_factory=dict)


LossTerms: TypeAlias = Mapping[str, LossTerm]
# Maps a model and a batch to the mean loss over its labels (a float32 scalar), or to several terms.
Objective: TypeAlias = Callable[[nn.Module, Mapping[str, Tensor]], Tensor | LossTerms]


def as_loss_terms(found: Tensor | LossTerms) -> LossTerms:
    """Return the result of an objective as terms by name."""
    return {TOTAL_LOSS: LossTerm(found)} if isinstance(found, Tensor) else found


def total_loss(found: Tensor | LossTerms) -> Tensor:
    """Return the sum of the terms of an objective, a scalar."""
    terms = list(as_loss_terms(found).values())
    total = terms[0].value
    for term in terms[1:]:
        total = total + term.value
    return total


def term_values(terms: LossTerms) -> dict[str, tuple[float, AveragedOver]]:
    """Return the value of each named term, and the items of its mean."""
    values_by_term: dict[str, tuple[float, AveragedOver]] = {}
    for name, term in terms.items():
        for component, value in (term.components or {name: term.value}).items():
            values_by_term[component] = float(value.detach()), term.averaged_over
    return values_by_term


def count_items(labels: Tensor) -> int:
    """Return the number of items over which the objective of a batch with these labels is a mean.

    -100 marks padding among classes and tokens only; in regression it is a value.
    """
    return labels.numel() if labels.is_floating_point() else int((labels != IGNORE_INDEX).sum())


def count_batch_items(batch: Mapping[str, Tensor]) -> dict[AveragedOver, int]:
    """Return the number of items of each kind in a batch; inputs without tokens count like labels."""
    labels, mask = count_items(batch["labels"]), batch.get(TOKEN_MASK_KEY, batch.get("attention_mask"))
    return {"labels": labels, "inputs": labels if mask is None else int(mask.sum())}


_MODULES_NAME = "smelt_extension"  # attribute of the model that holds the modules while it trains


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with optimizer settings of their own.

    learning_rate: the peak; the schedule is that of the others. weight_decay: of these. None: as the
    others. maximize: gradient ascent, as for the multipliers of a constraint.
    """

    parameters: Sequence[nn.Parameter]
    learning_rate: float | None = None
    weight_decay: float | None = None
    maximize: bool = False

    def optimizer_options(self) -> dict[str, Any]:
        """Return the settings that are not None, by the optimizer's names."""
        settings = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        options: dict[str, Any] = {option: value for option, value in settings.items() if value is not None}
        return options | ({"maximize": True} if self.maximize else {})


def _allow_any_step(step: int) -> bool:
    return True


def _unchanged_samples(
    samples: list[EncodedSample], validation: list[EncodedSample] | None
) -> tuple[list[EncodedSample], list[EncodedSample] | None]:
    return samples, validation


def _ignore_step(step: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class TrainingExtension:
    """Parts that a technique adds to a training.

    modules: trained with the model (same device, gradient clipping, averages, checkpoint selection) and
        not saved: projections, scores of masks, multipliers.
    groups: parameters of the model or of `modules` with their own learning rate or weight decay.
    prepare_samples: gets the encoded training and validation samples and returns the ones to use.
    training_context: active while the model trains (hooks that capture tensors).
    as_stored: active while a checkpoint is written; makes the model as it will be stored.
    as_incoming: active while the model is validated before the first update: a quantized model computes with
        its incoming quantized weights, which differ from those of its float master weights.
    before_step, after_step: called with the number of the update, from 1, and the number of updates; the
        latter after the weights are updated, and before they are averaged or validated. Parameters may be
        divided over processes then (FSDP): only a forward pass and `as_stored` have whole ones.
    supports_resume: whether an interrupted training can resume with it: all its state is in parameters and
        buffers. None: if it has no calls in each step.
    may_be_best: whether the weights after this update (0: before the first) may be selected: while weights
        are still being pruned, the densest have the lowest loss.
    """

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    groups: Sequence[ParameterGroup] = ()
    prepare_samples: Callable[
        [list[EncodedSample], list[EncodedSample] | None],
        tuple[list[EncodedSample], list[EncodedSample] | None],
    ] = _unchanged_samples
    training_context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    as_stored: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    as_incoming: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    before_step: Callable[[int, int], None] = _ignore_step
    after_step: Callable[[int, int], None] = _ignore_step
    supports_resume: bool | None = None
    may_be_best: Callable[[int], bool] = _allow_any_step

    @property
    def can_resume(self) -> bool:
        """Whether a training with it can resume from a checkpoint."""
        has_no_hooks = self.before_step is _ignore_step and self.after_step is _ignore_step
        return has_no_hooks if self.supports_resume is None else self.supports_resume


class TrainingTechnique(Protocol):
    """A technique that changes the model while it trains: it starts when it is created."""

    def objective(self, objective: Objective) -> Objective:
        """Return the objective to minimize instead of `objective`."""

    def extension(self) -> TrainingExtension:
        """Return the extension of the training."""

    def finalize(self, ctx: Context) -> None:
        """Convert the model to its stored form, and report to `ctx`."""


def combine_extensions(first: TrainingExtension, second: TrainingExtension) -> TrainingExtension:
    """Return the combination of two extensions; weights may be selected if both allow it."""

    def entering(
        *parts: Callable[[], AbstractContextManager[Any]],
    ) -> Callable[[], AbstractContextManager[Any]]:
        @contextlib.contextmanager
        def entered() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                for extension in parts:
                    stack.enter_context(extension())
                yield

        return entered

    def after_one_another(*parts: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def called(step: int, total: int) -> None:
            for extension in parts:
                extension(step, total)

        return called

    def rows(
        train: list[EncodedSample], validation: list[EncodedSample] | None
    ) -> tuple[list[EncodedSample], list[EncodedSample] | None]:
        return second.prepare_samples(*first.prepare_samples(train, validation))

    return TrainingExtension(
        modules={**first.modules, **second.modules},
        prepare_samples=rows,
        groups=[*first.groups, *second.groups],
        training_context=entering(first.training_context, second.training_context),
        as_stored=entering(first.as_stored, second.as_stored),
        as_incoming=entering(first.as_incoming, second.as_incoming),
        before_step=after_one_another(first.before_step, second.before_step),
        after_step=after_one_another(first.after_step, second.after_step),
        may_be_best=lambda step: first.may_be_best(step) and second.may_be_best(step),
        supports_resume=first.can_resume and second.can_resume,
    )


@contextlib.contextmanager
def modules_attached(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Attach `modules` to `model` inside the context, so that they move with it."""
    if not modules:
        yield
        return
    model.add_module(_MODULES_NAME, nn.ModuleDict(dict(modules)))
    try:
        yield
    finally:
        del model._modules[_MODULES_NAME]


def attached_modules(model: nn.Module) -> nn.Module:
    """Return the modules that `modules_attached` has attached; an empty module without any."""
    modules = model._modules.get(_MODULES_NAME)
    return nn.Module() if modules is None else modules


@contextlib.contextmanager
def modules_detached(model: nn.Module) -> Iterator[None]:
    """Detach the attached modules from `model` inside the context, as it will be stored."""
    attached = model._modules.pop(_MODULES_NAME, None)
    try:
        yield
    finally:
        if attached is not None:
            model._modules[_MODULES_NAME] = attached


def split_parameter_groups(
    options: Sequence[Mapping[str, Any]], groups: Sequence[ParameterGroup]
) -> list[dict[str, Any]]:
    """Return the optimizer's groups without the parameters of `groups`, followed by those groups.

    Args:
        options: torch's parameter groups.
        groups: the groups to split off; each inherits unset values from the group of its parameters.
    """
    split_groups: list[dict[str, Any]] = []
    group_numbers = {id(p): number for number, group in enumerate(groups) for p in group.parameters}
    for option in options:
        other_parameters = [p for p in option["params"] if id(p) not in group_numbers]
        split_groups.append({**option, "params": other_parameters})
        for number, group in enumerate(groups):
            group_parameters = [p for p in option["params"] if group_numbers.get(id(p)) == number]
            if group_parameters:
                split_groups.append({**option, "params": group_parameters, **group.optimizer_options()})
    return [option for option in split_groups if option["params"]]


def mean_loss(
    model: Any, batches: Sequence[TensorBatch], objective: Objective, precision: str, device: torch.device
) -> float:
    """Return the objective's mean over all items of `batches`, in eval mode, without gradients.

    batches: of this process; the mean is over those of all.
    """
    sums: dict[str, float] = {}
    counts: dict[AveragedOver, int] = dict.fromkeys(AVERAGED_OVER, 0)
    kinds: dict[str, AveragedOver] = {}
    was_training = model.training
    model.eval()
    with torch.no_grad(), autocast(precision, device):
        for batch in batches:
            on_device = {name: value.to(device) for name, value in batch.items()}
            items = count_batch_items(batch)
            for averaged_over in AVERAGED_OVER:
                counts[averaged_over] += items[averaged_over]
            for name, (mean, averaged_over) in term_values(
                as_loss_terms(objective(model, on_device))
            ).items():
                sums[name] = sums.get(name, 0.0) + mean * items[averaged_over]
                kinds[name] = averaged_over
    model.train(was_training)
    parts = gather_parts((sums, counts, kinds))
    kinds = {name: averaged_over for process_part in parts for name, averaged_over in process_part[2].items()}
    total = 0.0
    for name, averaged_over in kinds.items():
        total += sum(process_part[0].get(name, 0.0) for process_part in parts) / max(
            1, sum(process_part[1][averaged_over] for process_part in parts)
        )
    return total
