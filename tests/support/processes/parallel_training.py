"""Trainings that one process, or several together, compute; as a program this is all of them.

Process 0 imports what all need and forks the others; it writes what it trained.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from smelt.compress.distill.stage import Distill
from smelt.compress.finetune import Finetune
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.core.process_group import process_rank
from smelt.core.stage_cache import StageCache
from smelt.core.store import Store
from smelt.pipeline.execute.training_worker import SharedStageCache
from smelt.training.checkpoint_selector import CheckpointSelector
from smelt.training.processes import LaunchSettings, join_processes, leave_processes
from smelt.training.sharding import FsdpWeights
from tests.support import harness
from tests.support.models import tiny

# as in a recipe without `device`, where no GPU is
DEVICE = "cpu" if torch.cuda.is_available() else "auto"
SHORT = {"max_steps": 4, "batch_size": 5, "precision": "fp32", "dropout": 0.0, "num_evals": 2,
         "learning_rate": 1e-3}  # fmt: skip
STUDENT = {"student": {"decoder_layers": 1}, "losses": {"logits": 1.0, "labels": 0.5, "hidden_states": 1.0}}
TEACHER_TEXTS = {"losses": {"labels": 1.0}, "sequence_level": {"num_beams": 2, "max_new_tokens": 6}}
PHASES = {"phases": [{"losses": {"hidden_states": 1.0}}, {"losses": {"logits": 1.0}}]} | {
    "student": {"decoder_layers": 1}
}
MASKS = {"learned_masks": {"keep_ratio": 0.5, "multiple_of": 1}}
ZEROS = {"sparsify": {"method": "magnitude", "sparsity": 0.5, "start": 0.0, "end": 0.5}}
# name: stage, settings, source
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "finetune": (Finetune, {"gradient_accumulation_steps": 2, "ema_decay": 0.9}, "model"),
    "by tokens": (Finetune, {"max_tokens_per_batch": 24, "gradient_checkpointing": True}, "model"),
    "selected": (Finetune, {"metric_for_best_model": "chrf"}, "model"),
    "masks": (Finetune, MASKS, "model"),
    "distill": (Distill, STUDENT, "model"),
    "teacher texts": (Distill, TEACHER_TEXTS, "model"),
}
SELECTED = {"metric_for_best_model": "chrf"}
# with weights that are whole between updates, scores of a technique, integers, twice divided
DIVIDED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "finetune": CASES["finetune"],
    "gradual zeros": (Finetune, ZEROS | SELECTED, "model"),
    "scores": (Finetune, {"sparsify": {"method": "soft-movement", "start": 0.0, "end": 0.5}}, "model"),
    "qlora": (Finetune, {"lora": {"r": 2}} | SELECTED, "kmeans"),
    "phases": (Distill, PHASES, "model"),
}


def score(artifact: Any, *_: Any) -> dict[str, float]:
    """Return a sum of the stored weights as the score."""
    from safetensors.torch import load_file

    weights = load_file(artifact.path / "model.safetensors")
    return {"chrf": float(sum(w.double().abs().sum() for w in weights.values()))}


def train(
    folder: Path,
    work: Path,
    name: str,
    launch: LaunchSettings | None = None,
    unfinished: Path | None = None,
    **more: Any,
) -> Any:
    """Train the case `name` on the model and the pairs in `folder`; return its context.

    unfinished: folder of its checkpoints, written after each update.
    """
    stage, options, origin = (CASES | DIVIDED)[name]
    saved = {} if unfinished is None else {"checkpoint_interval_minutes": 0}
    settings = stage.settings_type.model_validate(SHORT | options | saved)
    source = tiny.as_artifact(folder / origin)
    out = work / name / f"out-{process_rank()}"
    (out / "own").mkdir(parents=True)
    rows = tiny.read_pairs(out / "own")
    cache = SharedStageCache(StageCache(Store(work / "store"), {}, print))
    return harness.run_stage(
        stage(), settings, source, out / "made", data=rows, score=score, launch=launch,
        cached_value=cache.cached_value, cached_files=cache.cached_files,
        next_checkpoint_folder=lambda: unfinished, device=DEVICE, **more,
    )  # fmt: skip


class StopError(Exception):
    """Ends a training before it is finished."""


def stop_before(step: int) -> Any:
    """Return a patch that ends every training before the update after `step`."""
    begin = CheckpointSelector.on_step_begin

    def stop(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == step:
            raise StopError
        return begin(self, args, state, control, **kwargs)

    return patch.object(CheckpointSelector, "on_step_begin", stop)


def require_division() -> Any:
    """Return a patch that requires that Trainer has divided every parameter before the first pass."""
    begin = FsdpWeights.begin

    def require(self: Any) -> None:
        assert all(isinstance(p, DTensor) for p in self.module.parameters())
        begin(self)

    return patch.object(FsdpWeights, "begin", require)


def write_models(folder: Path) -> None:
    """Write the model and the quantized one that the cases train."""
    tiny.write_marian(folder / "model")
    rows = tiny.read_pairs(folder)
    settings = QuantizeSettings(scheme="kmeans4")  # no activations are rounded
    splits = {"calibration": rows}
    harness.run_stage(Quantize(), settings, folder / "model", folder / "kmeans", data=splits)


def run_processes(folder: Path, work: Path, *names: str, count: int = 2) -> None:
    """Train the cases `names` in `count` processes, which write into `work`."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "localhost",
              "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    command = [sys.executable, __file__, str(folder), str(work), *names]
    done = subprocess.run(
        command, env=os.environ | shared, stderr=subprocess.PIPE, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr


def details_file(work: Path, name: str) -> Path:
    """Return the file with the details of a case that process 0 writes."""
    return work / f"{name.replace('/', '-')}.json"


def launch_of(strategy: str) -> LaunchSettings:
    """Return two processes of `strategy`, of which DeepSpeed's are zero1, zero2, zero3 and zero3-offload."""
    zero, _, offload = strategy.partition("-")
    if not zero.startswith("zero"):
        return LaunchSettings(num_processes=2, strategy=strategy or "ddp")
    return LaunchSettings(
        num_processes=2, strategy="deepspeed", zero_stage=int(zero[4:]), cpu_offload=bool(offload)
    )


def main() -> None:
    """Train the cases of the command line together with the other processes."""
    folder, work, *names = sys.argv[1:]
    children = fork_ranks(int(os.environ["WORLD_SIZE"]))
    join_processes("cpu", "deepspeed" if any("/zero" in name for name in names) else "ddp")
    for name in names:
        case, strategy, suffix = (*name.split("/"), "", "")[:3]
        launch = launch_of(strategy)
        unfinished = Path(work) / f"unfinished-{strategy}" if suffix else None
        case_folder = Path(work) / (name.replace("/", "-"))
        with contextlib.ExitStack() as stack:
            if suffix == "stopped":
                stack.enter_context(contextlib.suppress(StopError))
                stack.enter_context(stop_before(3))
            stack.enter_context(require_division())
            ctx = train(Path(folder), case_folder, case, launch, unfinished)
            if process_rank() == 0:
                details_file(Path(work), name).write_text(json.dumps(ctx.details))
        if suffix == "stopped" and process_rank() == 0:
            shutil.copytree(Path(work) / f"unfinished-{strategy}", Path(work) / f"stopped-{strategy}")
    leave_processes()
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)


def fork_ranks(count: int) -> list[int]:
    """Continue in `count` processes, with RANK set in each; return the others' ids in the first one."""
    children = []
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    for rank in range(1, count):
        if child := os.fork():
            children.append(child)
        else:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return []
    return children


if __name__ == "__main__":
    main()
