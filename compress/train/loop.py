"""The training loop: `transformers.Trainer` with our batches, losses and choice of checkpoint.

The best weights wait in memory, and the folder that Trainer insists on is a temporary one beside the stage's
result. What outlives a run that was stopped are our own checkpoints (compress/train/stored/resume.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

from smelt.compress.train.data import (
    Row,
    TensorBatch,
    collate,
    group_by_length,
    plan_batches,
)
from smelt.compress.train.extension import Extension, attached, detached, split_groups
from smelt.compress.train.keeper import Keeper
from smelt.compress.train.memory import require_training_memory
from smelt.compress.train.objective import mean_loss
from smelt.compress.train.rates import with_rate
from smelt.compress.train.settings import TrainingSettings
from smelt.compress.train.state import autocast, pick_precision, threads, training_state
from smelt.compress.train.stored.resume import resume_of
from smelt.compress.train.terms import (
    OVER,
    Objective,
    counts_of,
    terms_of,
    values_of,
)
from smelt.core.artifact import Artifact
from smelt.core.errors import RunError
from smelt.core.messages import warning
from smelt.core.stage import Context
from smelt.runtime.backends.device import torch_device

# Where TensorBoard's callback of transformers writes.
_BOARD = "TENSORBOARD_LOGGING_DIR"
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


Scored = TypeVar("Scored")


class Loop(transformers.Trainer):  # type: ignore[misc]
    """Trainer with a planned list of batches and an objective of ours.

    The gradient of an update is that of the mean over all items (tokens, rows) of its batches, on all
    processes, as if they were one batch: each batch's mean counts by its share of the items. So Trainer
    must not divide by the number of batches: from 5.19 on the attribute says so, and before that the
    signature of the model's forward, which takes keywords in every family that is known here.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        rows: Sequence[Row],
        *,
        plan: list[list[int]],
        objective: Objective,
        keeper: Keeper,
        precision: str,
    ) -> None:
        pack = partial(collate, config=model.config)
        super().__init__(model=model, args=args, train_dataset=rows, callbacks=[keeper], data_collator=pack)
        self.remove_callback(transformers.trainer_callback.PrinterCallback)
        self.plan, self.objective, self.keeper, self.precision = plan, objective, keeper, precision

    def get_train_dataloader(self) -> Any:
        """Return the planned batches; accelerate shares them out among processes."""
        loader = DataLoader(self.train_dataset, batch_sampler=self.plan, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)

    def create_optimizer(self, model: Any = None) -> Any:
        """Return the optimizer, in which the technique's groups have settings of their own."""
        optimizer = super().create_optimizer(model)
        groups = self.keeper.extension.groups
        if groups:
            optimizer.param_groups[:] = split_groups(optimizer.param_groups, groups)
        return optimizer

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the batches of one update, and the number of labels in those of all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = [counts_of(batch) for batch in batches]
        items = torch.tensor([sum(found[over] for found in counts) for over in OVER], device=device)
        whole = self.accelerator.gather(items).reshape(-1, len(OVER)).sum(dim=0)
        self.items = dict(zip(OVER, whole.tolist(), strict=True))
        return batches, whole[0]

    def compute_loss(
        self, model: Any, inputs: TensorBatch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the batch's part of the update's mean loss; stop where it is not finite."""
        with autocast(self.precision, self.args.device):
            terms = terms_of(self.objective(model, inputs))
        values, counts = values_of(terms), counts_of(inputs)
        value = sum(mean for mean, _ in values.values())
        if not math.isfinite(value):
            raise RunError(
                f"The training loss became {value} at step {self.state.global_step + 1}"
                f" of {self.state.max_steps}. {self.keeper.last_good()}"
                " Lower learning_rate, raise warmup, or set precision: fp32.",
                code="non-finite-loss",
            )
        self.keeper.recent.append({name: (mean, counts[over]) for name, (mean, over) in values.items()})
        # gradients are averaged over processes afterwards
        whole, processes = self.items, self.accelerator.num_processes
        shares = {over: counts[over] * processes / max(1, whole[over]) for over in OVER}
        parts = [term.value * shares[term.over] for term in terms.values()]
        return sum(parts[1:], parts[0])


def run_training(
    model: Any,
    rows: Sequence[Row],
    validation: Sequence[Row] | None,
    *,
    objective: Objective,
    settings: TrainingSettings,
    ctx: Context,
    score: Callable[[], float] | None = None,
    probe: Callable[[], Mapping[str, float]] | None = None,
    extension: Extension | None = None,
    src: Artifact | None = None,
) -> None:
    """Train `model` in place (see `smelt.compress.train.run.train`).

    score: of the model as it is at the moment; higher is better. None: the validation loss decides.
    probe: scores weights at each validation, for a warning where that and the loss disagree.
    src: what the step goes on from.
    """
    extension, settings = extension or Extension(), with_rate(settings, model, src, ctx)
    plan = plan_batches(
        rows,
        settings.batch_size,
        settings.max_tokens_per_batch,
        epochs=settings.epochs,
        steps=None
        if settings.max_steps is None
        else settings.max_steps * settings.gradient_accumulation_steps,
        seed=ctx.seed,
    )
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="train-", dir=ctx.out.parent))
        stack.enter_context(threads(ctx.threads))
        stack.enter_context(_board(settings, ctx))
        args = _arguments(settings, folder, ctx)
        precision = pick_precision(settings.precision, args.device)
        stack.enter_context(attached(model, extension.modules))
        stack.enter_context(training_state(model, settings.dropout, args.device))
        stack.enter_context(extension.around())
        keeper = Keeper(model, settings.ema_decay, ctx.progress, extension)
        resume = resume_of(model, keeper, plan, precision, settings, ctx)
        if resume.saved is not None and resume.saved.details is not None:
            ctx.details["training"] = resume.saved.details
            ctx.warnings.extend(resume.saved.warnings)
            return
        if resume.saved is not None:
            plan, args.max_steps = plan[resume.step * settings.gradient_accumulation_steps :], resume.total
        loop = Loop(model, args, rows, plan=plan, objective=objective, keeper=keeper, precision=precision)
        loop.add_callback(resume)
        if validation:
            groups = group_by_length(validation, settings.batch_size, settings.max_tokens_per_batch, None)
            batches = [collate([validation[i] for i in group], model.config) for group in groups]
            keeper.evaluate = partial(mean_loss, model, batches, objective, precision, args.device)
            keeper.evals = settings.num_evals
            keeper.score = None if score is None else partial(_as_stored, model, extension, score)
            keeper.probe = None if probe is None else partial(_as_stored, model, extension, probe)
            keeper.sign = -1 if settings.metric_for_best_model in ctx.turned else 1
        require_training_memory(
            model, args.device, keeps_best=bool(keeper.evals), averages=settings.ema_decay is not None
        )
        loop.train()
        steps = int(loop.state.global_step)
        keeper.finish()
        _require_finite(model, keeper)
        ctx.details["training"] = {
            "steps": steps,
            "rows": len(rows),
            "learning_rate": settings.learning_rate,
            **({} if settings.dropout is None else {"dropout": settings.dropout}),
            "precision": precision,
            "device": args.device.type,
            **keeper.details(steps),
        }
        doubts = {
            "no-improvement": keeper.gave_nothing(settings.metric_for_best_model),
            "loss-disagrees": disagreement(keeper, len(validation or ()), ctx),
            "worse-than-random": keeper.learned_nothing(),
        }
        warnings = [warning(code, text) for code, text in doubts.items() if text]
        ctx.warnings.extend(warnings)
        resume.finish(steps, ctx.details["training"], warnings)


def disagreement(keeper: Keeper, rows: int, ctx: Context) -> str | None:
    """Return a warning where other weights score clearly better than those with the least loss.

    Clearly: by two standard errors of a paired difference of which an eighth of the validation rows change.
    """
    there = [found for found in keeper.validations if found.beside and keeper.extension.eligible(found.step)]
    if keeper.best is None or not keeper.best.beside or not rows:
        return None
    metric, kept = next(iter(keeper.best.beside.items()))
    best = max(there, key=lambda found: found.beside[metric])
    if best.beside[metric] - kept <= 2 * 100 * math.sqrt(0.125 / rows):
        return None
    sign = -1 if metric in ctx.turned else 1
    return (
        f"Validation loss and {metric} disagree: the weights of step {keeper.best.step} are kept for their"
        f" loss ({keeper.best.loss:.4g}; {metric} {sign * kept:.4g}), but those of step {best.step} have"
        f" {metric} {sign * best.beside[metric]:.4g} (loss {best.loss:.4g}). To keep them, set"
        f" metric_for_best_model:"
        f" {metric}."
    )


def _as_stored(model: nn.Module, extension: Extension, score: Callable[[], Scored]) -> Scored:
    with detached(model), extension.stored():
        return score()


def _require_finite(model: nn.Module, keeper: Keeper) -> None:
    """Make sure that the last update, after which no loss is computed, left numbers.

    Raises:
        RunError: a weight is infinite or not a number.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not bool(torch.isfinite(parameter).all()):
            raise RunError(
                f"The last update of the training made '{name}' infinite or not a number."
                f" {keeper.last_good()} Lower learning_rate, raise warmup, or set precision: fp32.",
                code="non-finite-weights",
            )


@contextlib.contextmanager
def _board(settings: TrainingSettings, ctx: Context) -> Iterator[None]:
    """Let TensorBoard's callback write into the run's folder, unless the user named another."""
    told = ctx.logs is None or "tensorboard" not in settings.report_to or _BOARD in os.environ
    if told:
        yield
        return
    os.environ[_BOARD] = str(ctx.logs)
    try:
        yield
    finally:
        del os.environ[_BOARD]


def _arguments(settings: TrainingSettings, folder: str, ctx: Context) -> Any:
    if ctx.device == "cuda":
        torch_device(ctx.device)  # says what is missing; Trainer would quietly take the CPU
    return transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,  # the plan of batches spans the whole run
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=_SCHEDULES[settings.lr_schedule],
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        seed=ctx.seed,
        use_cpu=ctx.device == "cpu",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="steps" if settings.report_to else "no",
        logging_steps=10,
        report_to=list(settings.report_to) or "none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        accelerator_config={"even_batches": False},
    )
