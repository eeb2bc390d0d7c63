"""The training loop: `transformers.Trainer` with our batches, losses and choice of checkpoint.

Nothing is written that outlives the run: the best weights wait in memory, and the folder that
Trainer insists on is a temporary one beside the stage's result.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from smelt.compress.train.classifier_losses import training_loss
from smelt.compress.train.data import Row, TensorBatch, collate, group_by_length, plan_batches
from smelt.compress.train.keeper import Keeper
from smelt.compress.train.losses import IGNORE
from smelt.compress.train.memory import require_training_memory
from smelt.compress.train.sentence_losses import order_loss, vectors_of
from smelt.compress.train.settings import TrainingSettings
from smelt.compress.train.state import threads, training_state
from smelt.core.errors import InputError, RunError
from smelt.core.stage import Context
from smelt.runtime.backends.device import bf16_works, torch_device
from smelt.runtime.models.sentence_model import is_sentence_model

# From a model and a batch to the mean loss over its labels (a float32 scalar).
Objective: TypeAlias = Callable[[nn.Module, TensorBatch], Tensor]
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


def logits_of(model: nn.Module, batch: TensorBatch) -> Tensor:
    """Return float [B, T, V] for a translator or language model, [B, C] for a classifier.

    `labels` are not fed.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    labels = batch["labels"]  # int64 [B, L] where texts come out, and then a cache could be asked for
    if labels.dim() == 2 and not labels.is_floating_point():
        logits: Tensor = model(**inputs, use_cache=False).logits
    else:
        logits = model(**inputs).logits
    return logits


def label_objective(smoothing: float = 0.0) -> Objective:
    """Return the mean loss with the labels (see `training_loss`), smoothed only while the model trains.

    Of a sentence embedder it is `order_loss` with the scores.
    """

    def objective(model: nn.Module, batch: TensorBatch) -> Tensor:
        plain: Any = getattr(model, "module", model)
        if is_sentence_model(plain):
            return order_loss(vectors_of(model, batch), batch["labels"])
        return training_loss(
            plain.config,
            logits_of(model, batch),
            batch["labels"],
            smoothing=smoothing if model.training else 0.0,
        )

    return objective


def pick_precision(wanted: str, device: torch.device) -> str:
    """Return fp32 or bf16; `auto` is bf16 where the processor multiplies bf16 natively.

    Raises:
        InputError: bf16 is asked for on a processor that cannot do it.
    """
    if wanted == "fp32" or device.type not in {"cpu", "cuda"}:
        return wanted if wanted != "auto" else "fp32"
    if device.type == "cuda":
        return (
            "bf16" if wanted == "bf16" or torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
        )
    # torch has no public question for this; without native products bf16 is slower than fp32
    native = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    if (native or wanted == "bf16") and bf16_works():
        return "bf16"
    if wanted == "bf16":
        raise InputError(
            "precision: bf16 products end this processor's process; set precision: fp32 (or auto)."
        )
    return "fp32"


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context in which products run in bf16, or one that changes nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def items_in(labels: Tensor) -> int:
    """Return over how many items the objective of a batch with these labels is a mean.

    -100 stands for padding among classes and tokens only; among numbers it is one.
    """
    return labels.numel() if labels.is_floating_point() else int((labels != IGNORE).sum())


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

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the batches of one update, and the number of items in those of all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        items = torch.tensor(sum(items_in(batch["labels"]) for batch in batches), device=device)
        return batches, self.accelerator.gather(items).sum()

    def compute_loss(
        self, model: Any, inputs: TensorBatch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the batch's part of the update's mean loss; stop where it is not finite."""
        with autocast(self.precision, self.args.device):
            loss = self.objective(model, inputs)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise RunError(
                f"The training loss became {value} at step {self.state.global_step + 1}"
                f" of {self.state.max_steps}. {self.keeper.last_good()}"
                " Lower learning_rate, raise warmup, or set precision: fp32."
            )
        items = items_in(inputs["labels"])
        self.keeper.recent.append((value * items, items))
        # gradients are averaged over processes afterwards
        return loss * (items * self.accelerator.num_processes / max(1, int(num_items_in_batch)))


def mean_loss(
    model: Any, batches: Sequence[TensorBatch], objective: Objective, precision: str, device: torch.device
) -> float:
    """Return the objective's mean over all labels of `batches`, in eval mode, without gradients."""
    total, count = 0.0, 0
    was_training = model.training
    model.eval()
    with torch.no_grad(), autocast(precision, device):
        for batch in batches:
            there = {name: value.to(device) for name, value in batch.items()}
            items = items_in(batch["labels"])
            total += float(objective(model, there)) * items
            count += items
    model.train(was_training)
    return total / max(1, count)


def run_training(
    model: Any,
    rows: Sequence[Row],
    validation: Sequence[Row] | None,
    *,
    objective: Objective,
    settings: TrainingSettings,
    ctx: Context,
    score: Callable[[], float] | None = None,
    stage: str = "finetune",
) -> None:
    """Train `model` in place (see `smelt.compress.train.run.train`).

    score: of the model as it is at the moment; higher is better. None: the validation loss decides.
    """
    plan = plan_batches(
        rows,
        settings.batch_size,
        settings.tokens_per_batch,
        epochs=settings.epochs,
        steps=None if settings.max_steps is None else settings.max_steps * settings.accumulate,
        seed=ctx.seed,
    )
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="train-", dir=ctx.out.parent))
        stack.enter_context(threads(ctx.threads))
        args = _arguments(settings, folder, ctx)
        precision = pick_precision(settings.precision, args.device)
        stack.enter_context(training_state(model, settings.dropout, args.device))
        keeper = Keeper(model, settings.ema, ctx.progress)
        loop = Loop(model, args, rows, plan=plan, objective=objective, keeper=keeper, precision=precision)
        if validation:
            groups = group_by_length(validation, settings.batch_size, settings.tokens_per_batch, None)
            batches = [collate([validation[i] for i in group], model.config) for group in groups]
            keeper.evaluate = partial(mean_loss, model, batches, objective, precision, args.device)
            keeper.evals, keeper.score = settings.evals, score
        require_training_memory(
            model, args.device, keeps_best=bool(keeper.evals), averages=settings.ema is not None
        )
        loop.train()
        keeper.finish()
        _require_finite(model, keeper)
    ctx.facts["training"] = {
        "steps": int(loop.state.global_step),
        "rows": len(rows),
        "precision": precision,
        "device": args.device.type,
        "train_loss": keeper.recent_loss(),
        "validation_loss": keeper.best.loss if keeper.best else None,
        "kept_step": keeper.best.step if keeper.best else int(loop.state.global_step),
        "validations": keeper.told(),
    }
    if warning := keeper.gave_nothing(settings.select):
        ctx.warnings.append(f"{stage}: {warning}")


def _require_finite(model: nn.Module, keeper: Keeper) -> None:
    """Make sure that the last update, after which no loss is computed, left numbers.

    Raises:
        RunError: a weight is infinite or not a number.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not bool(torch.isfinite(parameter).all()):
            raise RunError(
                f"The last update of the training made '{name}' infinite or not a number."
                f" {keeper.last_good()} Lower learning_rate, raise warmup, or set precision: fp32."
            )


def _arguments(settings: TrainingSettings, folder: str, ctx: Context) -> Any:
    if ctx.device == "cuda":
        torch_device(ctx.device)  # says what is missing; Trainer would quietly take the CPU
    return transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,  # the plan of batches spans the whole run
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=_SCHEDULES[settings.schedule],
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
