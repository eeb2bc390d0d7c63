"""Going on with a training that was stopped: checkpoints of all that decides how it would have gone on.

A checkpoint is one file of tensors (weights, AdamW's moments, best and averaged weights, the state of the
random numbers) with the rest as JSON in its header, and a note that names it and its hash, written last. So
there is a whole one or none, and nothing is unpickled. A training that goes on computes to the bit what the
one that was stopped would have computed, on the same machine with as many threads.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from smelt.compress.train.keeper import Keeper
from smelt.compress.train.settings import TrainingSettings
from smelt.core.errors import InputError
from smelt.core.files import flush, hash_of, read_json, sha256_of, write_json
from smelt.core.messages import Message, as_json
from smelt.core.stage import Context

NOTE = "checkpoint.json"
_HEADER = "training"  # the header's key under which the JSON stands
_WEIGHT, _BEST, _AVERAGE, _MOMENT, _RANDOM = "weight/", "best/", "average/", "moment/", "random/"


@dataclass(frozen=True)
class Checkpoint:
    """What was saved. step: updates that were done. details: of a training that was finished; else None."""

    step: int
    tensors: dict[str, Tensor]
    told: dict[str, Any]

    @property
    def details(self) -> dict[str, Any] | None:
        """What the report is told of the training, where it was finished."""
        found: dict[str, Any] | None = self.told.get("details")
        return found

    @property
    def warnings(self) -> list[Message]:
        """What it warned of."""
        return [Message(**found) for found in self.told.get("warnings", ())]

    def of(self, kind: str) -> dict[str, Tensor]:
        """Return the tensors of a kind by their own names."""
        return {n.removeprefix(kind): t for n, t in self.tensors.items() if n.startswith(kind)}


def read_checkpoint(folder: Path, identity: str, say: Callable[[str], None]) -> Checkpoint | None:
    """Return what was saved in `folder`; None where there is nothing, or nothing of the same training.

    Args:
        folder: of this training.
        identity: of the plan of batches and all that the same updates depend on.
        say: is told of a damaged file, in whose place the training begins anew.
    """
    try:
        note = read_json(folder / NOTE)
        if not note or note["identity"] != identity:
            return None
        path = folder / Path(str(note["file"])).name
        if sha256_of(path) != note["sha256"]:
            raise ValueError("its bytes are not those that were written")
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            told = json.loads(file.metadata()[_HEADER])
        return Checkpoint(int(note["step"]), tensors, told)
    except (OSError, InputError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        say(f"  a checkpoint in {folder} cannot be read ({error}); the training begins anew")
        return None


def write_checkpoint(
    folder: Path, identity: str, step: int, tensors: Mapping[str, Tensor], told: Mapping[str, Any]
) -> None:
    """Save a checkpoint in `folder`; the one before goes when this one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step}{'-end' if 'details' in told else ''}.safetensors"
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    save_file(_apart(plain), path, metadata={_HEADER: json.dumps(told)})
    flush(path)
    write_json(
        folder / NOTE, {"identity": identity, "step": step, "file": path.name, "sha256": sha256_of(path)}
    )
    for other in folder.glob("*.safetensors"):
        if other != path:
            other.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what a write that failed left in `folder`; a checkpoint that was whole before stays there."""
    named: set[str] = set()
    with contextlib.suppress(OSError, InputError, KeyError, TypeError):
        named = {NOTE, str(read_json(folder / NOTE)["file"])}
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name not in named:
                path.unlink()
        if not named:
            folder.rmdir()


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same, none of which shares memory with another: the format has no names for that."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return found


class Resume(transformers.TrainerCallback):  # type: ignore[misc]
    """Saves a training now and then, and lets one go on from what was saved.

    saved: what it goes on from; None where it begins.
    """

    def __init__(
        self,
        model: nn.Module,
        keeper: Keeper,
        folder: Path | None,
        identity: str,
        minutes: float | None,
        say: Callable[[str], None],
    ) -> None:
        """Look for what was saved, and put it into `model` and `keeper`.

        Args:
            model: with all that trains; its buffers are saved too.
            keeper: its best and averaged weights and what it has seen.
            folder: where checkpoints of this training are; None: none are kept.
            identity: see `read_checkpoint`.
            minutes: between two checkpoints; 0: after each update; None: none are written.
            say: a line for the log.
        """
        self.model, self.keeper, self.folder, self.identity = model, keeper, folder, identity
        self.minutes, self._say = minutes, say
        self._began = self._last = time.monotonic()
        self._random_pending = False
        self.saved = None if folder is None else read_checkpoint(folder, identity, say)
        if self.saved is not None:
            self._put(self.saved)
            if self.saved.details is None:
                say(f"  goes on from step {self.saved.step:,}, where an earlier run was stopped")

    @property
    def step(self) -> int:
        """How many updates were done before."""
        return self.saved.step if self.saved else 0

    @property
    def total(self) -> int:
        """How many there are in all, where some were done before."""
        return int(self.saved.told["total"]) if self.saved else 0

    def _changing(self) -> dict[str, Tensor]:
        return {**self.keeper.parameters, **dict(self.model.named_buffers())}

    def _put(self, saved: Checkpoint) -> None:
        weights = saved.of(_WEIGHT)
        with torch.no_grad():
            for name, tensor in self._changing().items():
                tensor.copy_(weights[name])
        if saved.details is None:
            self.keeper.take(saved.told["keeper"], saved.of(_BEST), saved.of(_AVERAGE))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give optimizer and schedule what they had, and count on from there."""
        self._last = time.monotonic()
        if self.saved is None:
            return
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in self.saved.of(_MOMENT).items():
            number, word = name.split("/")
            moments.setdefault(int(number), {})[word] = tensor
        groups = self.saved.told["groups"]
        kwargs["optimizer"].load_state_dict({"state": moments, "param_groups": groups})
        kwargs["lr_scheduler"].load_state_dict(self.saved.told["schedule"])
        state.global_step, self._random_pending = self.saved.step, True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on with the random numbers; only here, because a loader of batches draws when it begins."""
        if self._random_pending and self.saved is not None:
            _set_random(self.saved.of(_RANDOM), self.saved.told["random"])
            self._random_pending = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, where it is time."""
        due = self.minutes is not None and time.monotonic() - self._last >= 60 * self.minutes
        if self.folder is None or not due or state.global_step >= state.max_steps:
            return
        optimizer = kwargs["optimizer"].state_dict()
        random_tensors, random_told = _random_state()
        tensors = {
            **self._named(_WEIGHT, self._changing()),
            **self._named(_BEST, self.keeper.best_weights),
            **self._named(_AVERAGE, self.keeper.average),
            **self._named(_RANDOM, random_tensors),
            **self._named(_MOMENT, _flat(optimizer["state"])),
        }
        told = {
            "total": state.max_steps,
            "keeper": self.keeper.tell(),
            "groups": optimizer["param_groups"],
            "schedule": kwargs["lr_scheduler"].state_dict(),
            "random": random_told,
        }
        self._write(state.global_step, tensors, told)

    def finish(self, step: int, details: Mapping[str, Any], warnings: list[Message]) -> None:
        """Save the weights of a long training that has come to its end: what follows may still be stopped."""
        long = self.minutes is not None and time.monotonic() - self._began >= 60 * self.minutes
        if self.folder is not None and (long or self.saved is not None):
            told = {"total": step, "details": dict(details), "warnings": as_json(warnings)}
            self._write(step, self._named(_WEIGHT, self._changing()), told)

    def _write(self, step: int, tensors: Mapping[str, Tensor], told: Mapping[str, Any]) -> None:
        """Write a checkpoint; where that cannot be, the training goes on all the same."""
        assert self.folder is not None
        try:
            write_checkpoint(self.folder, self.identity, step, tensors, told)
        except (OSError, SafetensorError) as error:
            _sweep(self.folder)
            self._say(f"  no checkpoint could be written to {self.folder}: {error}; the training goes on")
        self._last = time.monotonic()

    @staticmethod
    def _named(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"{kind}{name}": tensor for name, tensor in tensors.items()}


def _flat(moments: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the optimizer's state of each parameter, by the parameter's number and the state's name."""
    return {f"{i}/{word}": torch.as_tensor(v) for i, state in moments.items() for word, v in state.items()}


def resume_of(
    model: nn.Module,
    keeper: Keeper,
    plan: list[list[int]],
    precision: str,
    settings: TrainingSettings,
    ctx: Context,
) -> Resume:
    """Return what saves this training, or lets it go on; where it cannot go on, nothing is saved."""
    folder = ctx.unfinished() if keeper.extension.can_resume else None
    shapes = {name: list(tensor.shape) for name, tensor in keeper.parameters.items()}
    identity = hash_of({"plan": plan, "precision": precision, "shapes": shapes, "seed": ctx.seed})
    return Resume(model, keeper, folder, identity, settings.checkpoint_interval_minutes, ctx.say)


def _random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    told = {"numpy": [kind, np.asarray(keys).tolist(), *rest], "python": [version, list(numbers), gauss]}
    return tensors, told


def _set_random(tensors: Mapping[str, Tensor], told: Mapping[str, Any]) -> None:
    torch.set_rng_state(tensors["cpu"])
    cuda = [tensors[name] for name in sorted(tensors) if name.startswith("cuda")]
    if cuda and torch.cuda.device_count() == len(cuda):
        torch.cuda.set_rng_state_all(cuda)
    kind, keys, *rest = told["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    version, numbers, gauss = told["python"]
    random.setstate((version, tuple(numbers), gauss))
