"""Checkpoints of a training: resume from them, score them, and check what is lost when weights are stored.

A checkpoint is one file of tensors (weights, AdamW's moments, best and averaged weights, the state of the
random numbers) with the rest as JSON in its header, and a note with its name and hash, written last. So a
checkpoint is complete or absent, and nothing is unpickled. A resumed training gives results identical to an
uninterrupted one, on the same machine with the same number of threads. During training a checkpoint is scored
like a finished artifact.

Weights train in float32 and are rounded once, to 16 bits, when the result is written. Measured on a Marian of
8.5 million float16 weights (benchmarks/recipes/half-precision.yaml): after 100 updates at 1e-4 the rounding
is 0.6 % of the change by training, after 20 at 1e-5 14 %, after 10 at 1e-6 86 %; then most weights return to
their old values. BLEU on 1,000 sentences differs by 0.04, 0.02 and 0.01, which is noise.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError, did_you_mean
from smelt.core.files import (
    fsync_path,
    json_hash,
    load_json,
    read_hashed_json,
    sha256_of,
    verified_content,
    write_hashed_json,
)
from smelt.core.messages import Message, messages_to_json
from smelt.core.process_group import from_first, process_count, process_rank, wait_for_all
from smelt.core.store import CHECKPOINT_FILE
from smelt.core.system import TerminatedError, is_termination_requested, termination_deferred
from smelt.data.splits import Split
from smelt.models.checkpoint import save_model
from smelt.models.edits import Edit
from smelt.models.empty_model import stored_dtypes
from smelt.models.layers import LowRankCorrectedLinear
from smelt.quantization.layers import MasterWeightLayer
from smelt.stage import Context, candidate_artifact
from smelt.training.checkpoint_selector import CheckpointSelector
from smelt.training.settings import TrainingSettings
from smelt.training.sharding import divided_like, local_part, whole_tensor

_METADATA_KEY = "training"  # the header's key of the JSON
_WEIGHT, _BEST, _AVERAGE, _MOMENT, _RANDOM = "weight/", "best/", "average/", "moment/", "random/"


@dataclass(frozen=True)
class Checkpoint:
    """A saved checkpoint. step: finished updates. details: of a finished training; else None."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def details(self) -> dict[str, Any] | None:
        """Details for the report, if the training was finished."""
        details: dict[str, Any] | None = self.state.get("details")
        return details

    @property
    def warnings(self) -> list[Message]:
        """Warnings of the training."""
        return [Message(**message) for message in self.state.get("warnings", ())]

    def tensors_of(self, kind: str) -> dict[str, Tensor]:
        """Return the tensors of a kind by their names."""
        return {n.removeprefix(kind): t for n, t in self.tensors.items() if n.startswith(kind)}


def read_checkpoint(folder: Path, identity: str, log: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint in `folder`; None if there is none, or it is of another training.

    Args:
        folder: of this training.
        identity: hash of the plan of batches and of everything else that the updates depend on.
        log: called with a line about a damaged file; the training then starts from the beginning.
    """
    try:
        if not (folder / CHECKPOINT_FILE).is_file():
            return None
        note = verified_content(load_json(folder / CHECKPOINT_FILE))
        if note["identity"] != identity:
            return None
        path = folder / Path(str(note["file"])).name
        if sha256_of(path) != note["sha256"]:
            raise ValueError("the file has been modified since it was written")
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            metadata = json.loads(file.metadata()[_METADATA_KEY])
        return Checkpoint(int(note["step"]), tensors, metadata)
    except (OSError, InputError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        log(f"  a checkpoint in {folder} cannot be read ({error}); the training starts from the beginning")
        return None


def write_checkpoint(
    folder: Path, identity: str, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Save a checkpoint in `folder`; the previous one is removed when this one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step}{'-end' if 'details' in state else ''}.safetensors"
    cpu_tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    save_file(_unshare(cpu_tensors), path, metadata={_METADATA_KEY: json.dumps(state)})
    fsync_path(path)
    write_hashed_json(
        folder / CHECKPOINT_FILE,
        {"identity": identity, "step": step, "file": path.name, "sha256": sha256_of(path)},
    )
    for other_path in folder.glob("*.safetensors"):
        if other_path != path:
            other_path.unlink(missing_ok=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove the files of a failed write in `folder`; a complete earlier checkpoint is kept."""
    note = read_hashed_json(folder / CHECKPOINT_FILE)
    kept_names = set() if note is None else {CHECKPOINT_FILE, str(note["file"])}
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name not in kept_names:
                path.unlink()
        if not kept_names:
            folder.rmdir()


def _unshare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without shared memory, which the format cannot represent."""
    storages: set[int] = set()
    unshared = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return unshared


class CheckpointCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Saves checkpoints of a training at intervals, and resumes it from the last one.

    saved: the checkpoint that it resumes from; None at the beginning.
    """

    def __init__(
        self,
        model: nn.Module,
        keeper: CheckpointSelector,
        folder: Path | None,
        identity: str,
        minutes: float | None,
        log: Callable[[str], None],
        on_saved: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """Read the last checkpoint, if any, and load it into `model` and `keeper`.

        Args:
            model: with all trained modules; its buffers are saved too.
            keeper: its best and averaged weights and its state.
            folder: of the checkpoints of this training; None: none are written.
            identity: see `read_checkpoint`.
            minutes: between two checkpoints; 0: after each update; None: none are written.
            log: writes a line to the log.
            on_saved: called with `folder` after each checkpoint.
        """
        self._on_saved = on_saved
        self.model, self.keeper, self.folder, self.identity = model, keeper, folder, identity
        self.minutes, self._log = minutes, log
        self._began = self._last = time.monotonic()
        self._random_pending = False
        self.saved = None if folder is None else read_checkpoint(folder, identity, log)
        if self.saved is not None:
            self._restore(self.saved)
            if self.saved.details is None:
                log(f"  resuming from step {self.saved.step:,} of an interrupted run")

    @property
    def step(self) -> int:
        """The number of finished updates of the checkpoint."""
        return self.saved.step if self.saved else 0

    @property
    def total(self) -> int:
        """The number of all updates, if the training was resumed."""
        return int(self.saved.state["total"]) if self.saved else 0

    def _trained_tensors(self) -> dict[str, Tensor]:
        return {**self.keeper.parameters, **dict(self.model.named_buffers())}

    def _restore(self, saved: Checkpoint) -> None:
        weights = saved.tensors_of(_WEIGHT)
        with torch.no_grad():
            for name, tensor in self._trained_tensors().items():
                tensor.copy_(weights[name])
        if saved.details is None:
            self.keeper.load_state(saved.state["keeper"])

    def _own_parts(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: local_part(divided_like(tensor, self.keeper.parameters[name])).cpu()
            for name, tensor in parameters.items()
        }

    def _whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: whole_tensor(part, self.keeper.parameters[name]) for name, part in parts.items()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the best and the averaged weights, the state of optimizer and schedule, and the step."""
        self._last = time.monotonic()
        if self.saved is None:
            return
        # only now: FSDP divides the parameters when the training begins
        self.keeper.best_weights = self._own_parts(self.saved.tensors_of(_BEST))
        self.keeper.average = self._own_parts(self.saved.tensors_of(_AVERAGE))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in self.saved.tensors_of(_MOMENT).items():
            number, moment_name = name.split("/")
            moments.setdefault(int(number), {})[moment_name] = tensor
        self._load_optimizer_state(kwargs["optimizer"], moments, self.saved.state["groups"])
        kwargs["lr_scheduler"].load_state_dict(self.saved.state["schedule"])
        if (scaler := getattr(kwargs["optimizer"], "scaler", None)) is not None:
            scaler.load_state_dict(self.saved.state["scaler"])
        state.global_step, self._random_pending = self.saved.step, True

    def _load_optimizer_state(
        self, optimizer: Any, moments: dict[int, dict[str, Tensor]], groups: list[dict[str, Any]]
    ) -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        for index, state_of_one in moments.items():
            for moment_name, tensor in state_of_one.items():
                if tensor.shape == trained[index].shape:
                    state_of_one[moment_name] = divided_like(tensor, trained[index])
        optimizer.load_state_dict({"state": moments, "param_groups": groups})

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the random numbers; only here, because a data loader draws when it starts."""
        if self._random_pending and self.saved is not None:
            _restore_random_state(self.saved.tensors_of(_RANDOM), self.saved.state["random"])
            self._random_pending = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save a checkpoint if it is due, or if SIGTERM asks for the end.

        Raises:
            TerminatedError: after the checkpoint that is the last one. Other processes than the first one
                train on until they are ended, if they do not take part in it.
        """
        is_ending = is_termination_requested()
        is_due = is_ending or (
            self.minutes is not None and time.monotonic() - self._last >= 60 * self.minutes
        )
        if self.keeper.weights.is_divided:  # all take part
            is_due, is_ending = from_first(lambda: (is_due, is_ending))
        elif process_rank():  # all have the same weights and optimizer states
            is_due = is_ending = False
        if is_due and self.can_save and state.global_step < state.max_steps:
            self._save(state, kwargs["optimizer"], kwargs["lr_scheduler"])
        if is_ending and state.global_step < state.max_steps:
            raise TerminatedError

    @property
    def can_save(self) -> bool:
        """Whether checkpoints of this training are written."""
        return self.folder is not None and self.minutes is not None

    def ending_on_sigterm(self) -> AbstractContextManager[None]:
        """Return a context in which SIGTERM ends a training after its update, with a checkpoint."""
        return termination_deferred() if self.can_save else contextlib.nullcontext()

    def _save(self, state: Any, wrapped_optimizer: Any, scheduler: Any) -> None:
        optimizer = wrapped_optimizer.state_dict()
        random_tensors, random_told = _random_state()
        tensors = {
            **self._prefixed(_WEIGHT, self._trained_tensors()),
            **self._prefixed(_BEST, self._whole(self.keeper.best_weights)),
            **self._prefixed(_AVERAGE, self._whole(self.keeper.average)),
            **self._prefixed(_RANDOM, random_tensors),
            **self._prefixed(_MOMENT, _flatten_moments(optimizer["state"])),
        }
        metadata = {
            "total": state.max_steps,
            "keeper": self.keeper.state_dict(),
            "groups": optimizer["param_groups"],
            "schedule": scheduler.state_dict(),
            "scaler": scaler.state_dict() if (scaler := getattr(wrapped_optimizer, "scaler", None)) else None,
            "random": random_told,
        }
        self._write(state.global_step, tensors, metadata)

    def finish(self, step: int, details: Mapping[str, Any], warnings: list[Message]) -> None:
        """Save the weights of a finished long training: the rest of the step may still be interrupted."""
        is_long = self.minutes is not None and time.monotonic() - self._began >= 60 * self.minutes
        is_long |= self.can_save and is_termination_requested()
        if self.keeper.weights.is_divided:
            is_long = from_first(lambda: is_long)
        if self.folder is not None and (is_long or self.saved is not None):
            metadata = {"total": step, "details": dict(details), "warnings": messages_to_json(warnings)}
            self._write(step, self._prefixed(_WEIGHT, self._trained_tensors()), metadata)

    def _write(self, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Write a checkpoint; the training continues if that fails."""
        assert self.folder is not None
        first, full_tensors = process_rank() == 0, dict[str, Tensor]()
        for name, tensor in tensors.items():
            full = whole_tensor(tensor)
            if first:
                full_tensors[name] = full.to("cpu")
        if not first:
            return
        try:
            write_checkpoint(self.folder, self.identity, step, full_tensors, metadata)
            self._on_saved(self.folder)
        except (OSError, SafetensorError) as error:
            _remove_leftovers(self.folder)
            self._log(f"  cannot write a checkpoint to {self.folder}: {error}; the training continues")
        self._last = time.monotonic()

    @staticmethod
    def _prefixed(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"{kind}{name}": tensor for name, tensor in tensors.items()}


def _flatten_moments(moments: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the optimizer's state of each parameter, by the parameter's number and the state's name."""
    flat_moments = {}
    for i, state in moments.items():
        for state_name, value in state.items():  # bitsandbytes nests its own states
            for name, inner_value in (value if isinstance(value, dict) else {state_name: value}).items():
                flat_moments[f"{i}/{name}"] = torch.as_tensor(inner_value)
    return flat_moments


def make_checkpoint_callback(
    model: nn.Module,
    selector: CheckpointSelector,
    plan: list[list[int]],
    precision: str,
    settings: TrainingSettings,
    ctx: Context,
) -> CheckpointCallback:
    """Return the callback that saves and resumes this training; it does nothing if it cannot resume."""
    can_resume = selector.extension.can_resume and selector.weights.supports_resume
    folder = ctx.next_checkpoint_folder() if can_resume else None
    shapes = {name: list(tensor.shape) for name, tensor in selector.parameters.items()}
    identity = json_hash({"plan": plan, "precision": precision, "shapes": shapes, "seed": ctx.seed})
    return CheckpointCallback(
        model,
        selector,
        folder,
        identity,
        settings.checkpoint_interval_minutes,
        ctx.log,
        ctx.checkpoint_saved,
    )


def _random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        # each of several processes has one GPU; the state of others would allocate memory on them
        states = torch.cuda.get_rng_state_all() if process_count() == 1 else [torch.cuda.get_rng_state()]
        tensors |= {f"cuda{i}": state for i, state in enumerate(states)}
    kind, keys, *position_state = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    metadata = {
        "numpy": [kind, np.asarray(keys).tolist(), *position_state],
        "python": [version, list(numbers), gauss],
    }
    return tensors, metadata


def _restore_random_state(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    torch.set_rng_state(tensors["cpu"])
    cuda = [tensors[name] for name in sorted(tensors) if name.startswith("cuda")]
    if cuda and process_count() > 1:
        torch.cuda.set_rng_state(cuda[0])
    elif cuda and torch.cuda.device_count() == len(cuda):
        torch.cuda.set_rng_state_all(cuda)
    kind, keys, *position_state = metadata["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *position_state))
    version, numbers, gauss = metadata["python"]
    random.setstate((version, tuple(numbers), gauss))


MAX_LOST_SHARE = 0.1  # relative to the norm of the change by training


class RoundingCheck:
    """Compares, after a training, the change by rounding with the change by training.

    Only for weights that are stored in 16 bits; the copies of the initial weights take 2 bytes each.

    grows: whether adapters train. Adapters that are already next to quantized weights are merged into others
    then, so their weights cannot be compared and are skipped.
    """

    def __init__(self, model: Any, src: Path, grows: bool = False) -> None:
        types = stored_dtypes(src)
        excluded_ids = {id(m.weight) for m in model.modules() if isinstance(m, MasterWeightLayer)}
        if grows:
            adapters = [m.adapter for m in model.modules() if isinstance(m, LowRankCorrectedLinear)]
            excluded_ids |= {id(p) for adapter in adapters for p in adapter.parameters()}
        self.model = model
        self.before: dict[str, Tensor] = {
            name: p.detach().to(types.dtype_for([name]), copy=True)
            for name, p in model.named_parameters()
            if p.requires_grad and id(p) not in excluded_ids and types.dtype_for([name]) != torch.float32
        }

    def lost_share(self) -> float:
        """Return |change by rounding| / |change by training|; 0 if neither changed anything."""
        rounded = trained = 0.0
        for name, p in self.model.named_parameters():
            before = self.before.get(name)
            if before is None:
                continue
            trained_value = p.detach().double()
            rounded += float((p.detach().to(before.dtype).double() - trained_value).square().sum())
            trained += float((trained_value - before.double()).square().sum())
        return math.sqrt(rounded / trained) if trained else 0.0

    def lost_share_text(self, share: float) -> str | None:
        """Return a warning if much of the training is lost by rounding, else None."""
        if share <= MAX_LOST_SHARE:
            return None
        return (
            f"Storing 16-bit weights, as in the source checkpoint, loses {share:.0%} of the training's"
            " changes to the"
            " weights. Set dtype: fp32 to keep them."
        )


class CheckpointScorer:
    """Scores `model` by the metric `settings.metric_for_best_model` on `split`, through `ctx.score`.

    The model, in its stored form (`TrainingExtension.as_stored`), is written as the stage will write it, with
    weights rounded to their stored dtype, and loaded by a runner, so that selection uses the weights that are
    delivered.
    """

    def __init__(
        self,
        model: Any,
        edits: list[Edit],
        src: Artifact,
        split: Split,
        settings: TrainingSettings,
        ctx: Context,
    ) -> None:
        self.model, self.edits, self.src, self.split = model, edits, src, split
        self.settings, self.ctx = settings, ctx

    def __call__(self) -> float:
        """Return the score by `settings.metric_for_best_model`; higher is better.

        Raises:
            InputError: the recipe does not score the metric.
        """
        scores, metric = self.scores(), self.settings.metric_for_best_model
        if metric not in scores:
            score_names = ", ".join(scores)
            raise InputError(
                f"metric_for_best_model: this recipe does not score '{metric}'. Scored metrics:"
                f" {score_names}.{did_you_mean(metric, scores)} Add it to score: {{quality: [...]}}, or"
                " set metric_for_best_model: loss.",
                code="metric-not-scored",
                setting="metric_for_best_model",
            )
        return float(scores[metric])

    def scores(self) -> dict[str, float]:
        """Return the score of each metric that the recipe scores; higher is better."""
        with (
            tempfile.TemporaryDirectory(prefix="score-", dir=self.ctx.out.parent) as space,
            _random_state_preserved(),
        ):
            folder = from_first(lambda: Path(space))  # all score what process 0 has written
            if process_rank() == 0:
                save_model(self.model, self.edits, folder, self.src.path, self.settings.dtype)
            wait_for_all()
            scores = dict(self.ctx.score(candidate_artifact(folder, self.src, self.ctx), self.split))
            wait_for_all()
            return scores


def _random_state_preserved() -> Any:
    """Return a context that preserves the state of torch's random numbers."""
    # not all devices: each process would occupy memory on the GPUs of the others
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    return torch.random.fork_rng(devices=devices)
