"""The training loop: `transformers.Trainer` with planned batches, objectives and checkpoint selection.

The best weights are kept in memory, and the folder that Trainer requires is a temporary one next to the
stage's result. Checkpoints that survive an interrupted run are smelt's own
(smelt/training/checkpoints.py).
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import transformers
from accelerate import DistributedType, ParallelismConfig
from torch import nn
from torch.utils.data import DataLoader

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, RunError
from smelt.core.messages import warning
from smelt.core.process_group import from_first, process_count, process_rank
from smelt.runtimes.device import torch_device, torch_threads
from smelt.stage import Context
from smelt.tasks.samples import EncodedSample, TensorBatch, collate, group_by_length, plan_batches
from smelt.training.checkpoint_selector import CheckpointSelector, log_training_curve
from smelt.training.checkpoints import make_checkpoint_callback
from smelt.training.extension import (
    AVERAGED_OVER,
    AveragedOver,
    Objective,
    TrainingExtension,
    as_loss_terms,
    count_batch_items,
    mean_loss,
    modules_attached,
    modules_detached,
    split_parameter_groups,
    term_values,
)
from smelt.training.processes import LaunchSettings, strategy_conflicts
from smelt.training.settings import TrainingSettings, with_learning_rate
from smelt.training.sharding import FsdpWeights, ModelWeights, ZeroWeights, fsdp_config, zero_config
from smelt.training.training_state import (
    autocast,
    compiled_forward,
    freed_memory_retained,
    gradient_checkpointing,
    pick_precision,
    require_training_memory,
    training_state,
)

_LR_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


ResultT = TypeVar("ResultT")


class _ObjectiveModule(nn.Module):
    """Computes the loss of a batch in `forward`, as DistributedDataParallel and FSDP require."""

    def __init__(self, model: nn.Module, objective: Objective, precision: str) -> None:
        super().__init__()
        self.model = model
        self.config: Any = model.config
        self._objective = (objective,)  # a tuple, so that a teacher in it is no part of the module
        self.precision = precision
        self.values: dict[str, tuple[float, AveragedOver]] = {}

    def forward(self, inputs: TensorBatch, shares: Mapping[AveragedOver, float] | None = None) -> Any:
        """Return the sum of the terms, each times the share of its items, and keep the terms' values.

        shares: None: return the terms.
        """
        with autocast(self.precision, inputs["labels"].device):
            terms = as_loss_terms(self._objective[0](self.model, inputs))
        if shares is None:
            return terms
        self.values = term_values(terms)
        parts = [term.value * shares[term.averaged_over] for term in terms.values()]
        return sum(parts[1:], parts[0])


class PlannedTrainer(transformers.Trainer):  # type: ignore[misc]
    """Trainer with a planned list of batches and an objective of smelt.

    The gradient of an update is that of the mean over all items (tokens, samples) of its batches, as if they
    were one batch: each batch's mean is weighted by its share of the items. So Trainer must not divide by
    the number of batches: from 5.19 on an attribute controls this, before that the signature of the model's
    forward, which takes keywords in all supported families.

    Several processes divide the samples of each batch, so that the updates are the same for any number.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        measured: _ObjectiveModule,
        args: Any,
        samples: Sequence[EncodedSample],
        *,
        plan: list[list[int]],
        keeper: CheckpointSelector,
    ) -> None:
        self.measured = measured
        pack = partial(_collate_part, config=measured.config)
        super().__init__(
            model=self.measured,
            args=args,
            train_dataset=_SamplesOrNone(samples, args.seed),
            callbacks=[keeper],
            data_collator=pack,
        )
        self.remove_callback(transformers.trainer_callback.PrinterCallback)
        self.plan, self.keeper = plan, keeper

    def get_train_dataloader(self) -> Any:
        """Return the planned batches; accelerate distributes their parts to processes."""
        parts = [batch_part for batch in self.plan for batch_part in divide_batch(batch, process_count())]
        loader = DataLoader(self.train_dataset, batch_sampler=parts, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)

    def create_optimizer(self, model: Any = None) -> Any:
        """Return the optimizer, with separate settings for the technique's groups."""
        if self.optimizer is not None:
            return self.optimizer  # with DeepSpeed, Trainer calls this twice
        optimizer = super().create_optimizer(model)
        # without empty groups, which DeepSpeed drops
        optimizer.param_groups[:] = split_parameter_groups(
            optimizer.param_groups, self.keeper.extension.groups
        )
        return optimizer

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the batches of one update, and the number of labels in those of all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = [_count_part(batch) for batch in batches]
        items = torch.tensor(
            [
                sum(counts_of_batch[averaged_over] for counts_of_batch in counts)
                for averaged_over in AVERAGED_OVER
            ],
            device=device,
        )
        totals = self.accelerator.gather(items).reshape(-1, len(AVERAGED_OVER)).sum(dim=0)
        self.items = dict(zip(AVERAGED_OVER, totals.tolist(), strict=True))
        return batches, totals[0]

    def compute_loss(
        self, model: Any, inputs: TensorBatch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the batch's part of the update's mean loss; raise if it is not finite."""
        counts = _count_part(inputs)
        # gradients are averaged over processes afterwards
        loss_shares = {
            averaged_over: counts[averaged_over] * process_count() / max(1, self.items[averaged_over])
            for averaged_over in AVERAGED_OVER
        }
        loss = model({name: value for name, value in inputs.items() if name != _NO_SAMPLES}, loss_shares)
        values = _mean_over_processes(self.measured.values, counts, loss.device)
        value = sum(mean for mean, _ in values.values())
        if not math.isfinite(value):
            raise RunError(
                f"The training loss became {value} at step {self.state.global_step + 1}"
                f" of {self.state.max_steps}. {self.keeper.last_good_text()}"
                " Lower learning_rate, raise warmup_steps, or set precision: fp32.",
                code="non-finite-loss",
            )
        self.keeper.recent.append(values)
        return loss


_NO_SAMPLES = "no_samples"  # a key of batches that only fill the place of a missing part


class _SamplesOrNone:
    """Samples by index (see `plan_batches`); -1 - i is sample i as the content of an empty part."""

    def __init__(self, samples: Sequence[EncodedSample], seed: int) -> None:
        self.samples, self.seed = samples, seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[EncodedSample, bool]:
        number, sample_index = divmod(index if index >= 0 else -1 - index, len(self.samples))
        return self.samples[sample_index].draw((1 + self.seed, number, sample_index)), index >= 0


def divide_batch(batch: Sequence[int], processes: int) -> list[list[int]]:
    """Return the indices of each process; without any of its own it gets -1 - the first one, which is empty.

    Every process must compute a gradient in every update.
    """
    return [list(batch[number::processes]) or [-1 - batch[0]] for number in range(processes)]


def _collate_part(samples: Sequence[tuple[EncodedSample, bool]], config: Any) -> TensorBatch:
    batch = collate([sample for sample, _ in samples], config)
    return batch if all(is_real for _, is_real in samples) else batch | {_NO_SAMPLES: torch.ones(1)}


def _count_part(batch: TensorBatch) -> dict[AveragedOver, int]:
    """Return the number of items of each kind in a process's part of a batch."""
    return dict.fromkeys(AVERAGED_OVER, 0) if _NO_SAMPLES in batch else count_batch_items(batch)


def _mean_over_processes(
    values: Mapping[str, tuple[float, AveragedOver]], counts: Mapping[AveragedOver, int], device: torch.device
) -> dict[str, tuple[float, int]]:
    """Return the mean of each named loss term over the items of all processes, and their number."""
    means = [(mean, counts[averaged_over]) for mean, averaged_over in values.values()]
    if process_count() > 1:
        # an empty part has no mean
        sums = torch.tensor(
            [[mean * items if items else 0.0, items] for mean, items in means],
            dtype=torch.float64,
            device=device,
        )
        torch.distributed.all_reduce(sums)
        means = [(total / max(1.0, items), int(items)) for total, items in sums.tolist()]
    return dict(zip(values, means, strict=True))


def run_training(
    model: Any,
    samples: Sequence[EncodedSample],
    validation: Sequence[EncodedSample] | None,
    *,
    objective: Objective,
    settings: TrainingSettings,
    ctx: Context,
    score: Callable[[], float] | None = None,
    probe: Callable[[], Mapping[str, float]] | None = None,
    extension: TrainingExtension | None = None,
    src: Artifact | None = None,
) -> None:
    """Train `model` in place (see `smelt.training.train.train`).

    score: of the current weights; higher is better. None: the validation loss selects.
    probe: scores weights at each validation, for a warning if metric and loss disagree.
    src: the step's input.
    """
    extension, settings = extension or TrainingExtension(), with_learning_rate(settings, model, src, ctx)
    plan = plan_batches(
        samples,
        settings.batch_size,
        settings.max_tokens_per_batch,
        epochs=settings.epochs,
        steps=None
        if settings.max_steps is None
        else settings.max_steps * settings.gradient_accumulation_steps,
        seed=ctx.seed,
        balanced=settings.sampling == "balanced",
    )
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="train-", dir=ctx.out.parent))
        stack.enter_context(torch_threads(ctx.threads))
        stack.enter_context(freed_memory_retained())
        # raises if CUDA is missing; Trainer would silently use the CPU
        device = torch.device(torch_device(ctx.device))
        precision = from_first(partial(pick_precision, settings.precision, device))
        launch = ctx.launch if process_count() > 1 else None
        require_trainable(model, settings, launch)
        args = _training_arguments(settings, folder, precision, ctx, device, launch, model)
        stack.enter_context(modules_attached(model, extension.modules))
        stack.enter_context(training_state(model, settings.dropout, args.device))
        if settings.gradient_checkpointing:
            stack.enter_context(gradient_checkpointing(model))
        stack.enter_context(extension.training_context())
        stack.enter_context(compiled_forward(model) if settings.torch_compile else contextlib.nullcontext())
        measured = _ObjectiveModule(model, objective, precision)
        weights = _weights_of(measured, launch, args.device)
        keeper = CheckpointSelector(
            model, settings.ema_decay, ctx.progress, extension, ctx.log_metrics, weights
        )
        checkpoint_callback = make_checkpoint_callback(model, keeper, plan, precision, settings, ctx)
        if checkpoint_callback.saved is not None and checkpoint_callback.saved.details is not None:
            ctx.details["training"] = checkpoint_callback.saved.details
            log_training_curve(checkpoint_callback.saved.details, ctx.log_metrics)
            ctx.warnings.extend(checkpoint_callback.saved.warnings)
            return
        if checkpoint_callback.saved is not None:
            plan, args.max_steps = (
                plan[checkpoint_callback.step * settings.gradient_accumulation_steps :],
                checkpoint_callback.total,
            )
        loop = PlannedTrainer(measured, args, samples, plan=plan, keeper=keeper)
        loop.add_callback(checkpoint_callback)
        if validation:
            groups = group_by_length(validation, settings.batch_size, settings.max_tokens_per_batch, None)
            own_groups = groups if weights.is_divided else groups[process_rank() :: process_count()]
            batches = [collate([validation[i] for i in group], model.config) for group in own_groups]
            keeper.evaluate = partial(
                mean_loss, measured, batches, nn.Module.__call__, precision, args.device
            )
            keeper.evals, keeper.patience = settings.num_evals, settings.early_stopping_patience
            keeper.score = None if score is None else partial(_as_stored, model, extension, weights, score)
            keeper.probe = None if probe is None else partial(_as_stored, model, extension, weights, probe)
            keeper.sign = -1 if settings.metric_for_best_model in ctx.negated_metrics else 1
        require_training_memory(
            model,
            args.device,
            optimizer=settings.optimizer,
            keeps_best=bool(keeper.evals),
            keeps_average=settings.ema_decay is not None,
            parts=process_count(),
            launch=launch,
        )
        stack.enter_context(checkpoint_callback.ending_on_sigterm())
        loop.train()
        steps = int(loop.state.global_step)
        keeper.load_best()
        _require_finite(model, keeper)
        ctx.details["training"] = {
            "steps": steps,
            "rows": sum(len(sample.packed or (sample,)) for sample in samples),
            "learning_rate": settings.learning_rate,
            **({} if settings.dropout is None else {"dropout": settings.dropout}),
            "precision": precision,
            "device": args.device.type,
            **({"processes": process_count()} if process_count() > 1 else {}),
            **keeper.details(steps),
        }
        texts = {
            "no-improvement": keeper.no_improvement_text(settings.metric_for_best_model),
            "loss-disagrees": metric_disagreement_text(keeper, len(validation or ()), ctx),
            "worse-than-random": keeper.worse_than_random_text(),
        }
        ctx.warnings.extend(warnings := [warning(code, text) for code, text in texts.items() if text])
        checkpoint_callback.finish(steps, ctx.details["training"], warnings)
        weights.restore()


def require_trainable(model: nn.Module, settings: TrainingSettings, launch: LaunchSettings | None) -> None:
    """Require a model and settings that the strategy of several processes can train; None: one process.

    Raises:
        InputError: `not-with-strategy`: such as fp16, or a parameter without dimensions that is divided.
    """
    if launch is None:
        return
    conflicts = strategy_conflicts(launch, settings)
    if launch.divides == 3:
        conflicts += [f"'{name}', a single number" for name, p in model.named_parameters() if not p.dim()]
    if conflicts:
        raise InputError(
            f"strategy: {launch.strategy} cannot train with {', '.join(conflicts)}. Remove it, or set"
            " strategy: ddp.",
            code="not-with-strategy",
            setting="launch.strategy",
        )


def _weights_of(
    measured: _ObjectiveModule, launch: LaunchSettings | None, device: torch.device
) -> ModelWeights:
    """Return the weights of `measured` as the strategy holds them; launch: None for one process."""
    if launch is None or launch.strategy == "ddp":
        return ModelWeights(measured)
    return FsdpWeights(measured) if launch.strategy == "fsdp" else ZeroWeights(measured, launch, device)


def metric_disagreement_text(selector: CheckpointSelector, rows: int, ctx: Context) -> str | None:
    """Return a warning if other weights score clearly better than those with the lowest loss.

    Clearly: by two standard errors of a paired difference in which an eighth of the samples change.
    """
    candidates = [
        validation
        for validation in selector.validations
        if validation.other_metrics and selector.extension.may_be_best(validation.step)
    ]
    if selector.best is None or not selector.best.other_metrics or not rows:
        return None
    metric, score = next(iter(selector.best.other_metrics.items()))
    best = max(candidates, key=lambda item: item.other_metrics[metric])
    if best.other_metrics[metric] - score <= 2 * 100 * math.sqrt(0.125 / rows):
        return None
    sign = -1 if metric in ctx.negated_metrics else 1
    return (
        f"Validation loss and {metric} disagree: the weights of step {selector.best.step} are kept for their"
        f" loss ({selector.best.loss:.4g}; {metric} {sign * score:.4g}), but those of step {best.step} have"
        f" {metric} {sign * best.other_metrics[metric]:.4g} (loss {best.loss:.4g}). To keep them, set"
        f" metric_for_best_model: {metric}."
    )


def _as_stored(
    model: nn.Module,
    extension: TrainingExtension,
    weights: ModelWeights,
    score: Callable[[], ResultT],
) -> ResultT:
    """Return the score of the weights as they will be stored; the processes compute it together."""
    with weights.whole(), modules_detached(model), extension.as_stored():
        score_value = score()
        return from_first(lambda: score_value)


def _require_finite(model: nn.Module, selector: CheckpointSelector) -> None:
    """Require finite weights after the last update, which no later loss would check.

    Raises:
        RunError: a weight is infinite or NaN.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not bool(torch.isfinite(selector.weights.read(parameter)).all()):
            raise RunError(
                f"After the last training update, '{name}' is infinite or NaN."
                f" {selector.last_good_text()} Lower learning_rate, raise warmup_steps, or set"
                " precision: fp32.",
                code="non-finite-weights",
            )


def _strategy_arguments(launch: LaunchSettings | None, model: nn.Module) -> dict[str, Any]:
    """Return the arguments of Trainer for the strategy of several processes; None: one process."""
    if launch is None or launch.strategy == "ddp":
        return {}
    if launch.strategy == "deepspeed":
        return {"deepspeed": zero_config(launch, model)}
    parallelism = ParallelismConfig(dp_shard_size=process_count())  # on the stage's device
    return {"fsdp": True, "fsdp_config": fsdp_config(model, launch), "parallelism_config": parallelism}


def _training_arguments(
    settings: TrainingSettings,
    folder: str,
    precision: str,
    ctx: Context,
    device: torch.device,
    launch: LaunchSettings | None,
    model: nn.Module,
) -> Any:
    args = transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,  # the plan of batches covers all epochs
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        optim=settings.optimizer,
        fp16=precision == "fp16",
        learning_rate=settings.learning_rate,
        lr_scheduler_type=_LR_SCHEDULES[settings.lr_scheduler_type],
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        seed=ctx.seed,
        use_cpu=device.type == "cpu",
        **_strategy_arguments(launch, model),
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        accelerator_config={"even_batches": False},
        ddp_find_unused_parameters=not settings.gradient_checkpointing,
        ddp_timeout=24 * 3600,
    )
    if device.type == "cpu" and args.fsdp:
        # accelerate starts FSDP on GPUs only
        args.distributed_state.distributed_type = DistributedType.MULTI_GPU
    # With several visible GPUs Trainer would wrap the model in DataParallel, which splits batches whose items
    # were counted as a whole.
    args._n_gpu = min(1, args.n_gpu)
    if args.world_size != process_count():
        raise RunError(
            f"launch: Trainer counts {args.world_size} processes instead of {process_count()}."
            " Set device: cpu, or cuda.",
            code="processes-miscounted",
        )
    return args
