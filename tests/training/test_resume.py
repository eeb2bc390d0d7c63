"""A training that was stopped ends with the weights, to the bit, of one that was not."""

import errno
import json
import os
import re
import signal

import pytest
import torch
from safetensors.torch import load_file

from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.core.store import StepCheckpoints, Store, list_step_checkpoints
from smelt.training import checkpoints
from smelt.training.checkpoint_selector import CheckpointSelector
from smelt.training.checkpoints import CHECKPOINT_FILE
from tests.support import harness
from tests.support.models import tiny
from tests.support.processes.fork_server import shared_server

STEPS = 8
SHORT = {
    "max_steps": STEPS, "batch_size": 3, "gradient_accumulation_steps": 2, "learning_rate": 3e-3,
    "precision": "fp32", "dropout": 0.2, "num_evals": 4, "warmup_steps": 2, "checkpoint_interval_minutes": 0,
}  # fmt: skip


class KilledError(BaseException):
    """No error that anything catches."""


@pytest.fixture
def rows(tmp_path):
    return tiny.read_pairs(tmp_path)


@pytest.fixture
def die(monkeypatch):
    """Let the process end, as far as the training can tell, before the given update of a training."""
    before = CheckpointSelector.on_step_begin

    def raise_at(step, training=1):
        counts = {"trainings": 0}

        def begin(self, args, state, control, **kwargs):
            counts["trainings"] += state.global_step == 0
            if state.global_step == step and counts["trainings"] == training:
                raise KilledError
            return before(self, args, state, control, **kwargs)

        monkeypatch.setattr(CheckpointSelector, "on_step_begin", begin)

    return raise_at


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def go(tmp_path, name, stage, settings, rows, lines=None, key="k"):
    """Run a stage; its checkpoints are those of every run with this key."""
    return harness.run_stage(
        stage, settings, tiny.write_marian(tmp_path / "m"), tmp_path / name / "out", data=rows,
        next_checkpoint_folder=StepCheckpoints(Store(tmp_path), key).next_folder,
        log=(lines if lines is not None else []).append,
    )  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The training of SHORT that nothing stopped."""
    home = tmp_path_factory.mktemp("whole")
    return go(home, "whole", Finetune(), FinetuneSettings.model_validate(SHORT), tiny.read_pairs(home))


@pytest.mark.parametrize(
    ("more", "stop"),
    [({}, 1), ({"ema_decay": 0.9, "num_evals": 0, "lr_scheduler_type": "cosine"}, 5), ({"lora": {"r": 2}}, 5),
     ({"optimizer": "adafactor"}, 5), ({"optimizer": "adamw_bnb_8bit"}, 5),
     ({"gradient_checkpointing": True, "early_stopping_patience": 1}, 3),
     ({"sparsify": {"start": 0, "end": 0.9}}, 5),
     ({"learned_masks": {"targets": ["heads", "width"], "learning_rate": 5.0, "warmup": 0.2}}, 5)],
)  # fmt: skip
def test_resumed_training_has_identical_weights(tmp_path, rows, die, more, stop):
    settings = FinetuneSettings.model_validate(SHORT | more)
    uninterrupted = go(tmp_path, "whole", Finetune(), settings, rows, key="other")
    die(stop)
    with pytest.raises(KilledError):
        go(tmp_path, "stopped", Finetune(), settings, rows)
    die(-1)
    lines = []
    resumed = go(tmp_path, "again", Finetune(), settings, rows, lines)
    assert [re.findall(r"\d+", line) for line in lines] == [[str(stop)]]
    assert same(weights(uninterrupted.out), weights(resumed.out))
    assert uninterrupted.details == resumed.details
    assert uninterrupted.warnings == resumed.warnings


def test_finished_phase_is_not_repeated(tmp_path, rows, die):
    phases = [{"losses": {"hidden_states": 1}, "max_steps": 4}, {"losses": {"logits": 1}}]
    options = {"student": {"decoder_layers": 1}, "phases": phases, "cache_logits": {"top_k": 4}}
    settings = DistillSettings.model_validate(SHORT | options)
    uninterrupted = go(tmp_path, "whole", Distill(), settings, rows, key="other")
    die(3, training=2)
    with pytest.raises(KilledError):
        go(tmp_path, "stopped", Distill(), settings, rows)
    die(-1)
    resumed = go(tmp_path, "again", Distill(), settings, rows)
    assert same(weights(uninterrupted.out), weights(resumed.out))
    assert uninterrupted.details["phases"] == resumed.details["phases"]
    notes = [
        json.loads((tmp_path / "unfinished" / "k" / n / CHECKPOINT_FILE).read_text()) for n in ("1", "2")
    ]
    assert [note["file"] for note in notes] == ["4-end.safetensors", "8-end.safetensors"]


@pytest.mark.parametrize("what", ["file", "note", "step"])
def test_damaged_checkpoint_is_reported_and_training_restarts(tmp_path, rows, die, what, uninterrupted):
    settings = FinetuneSettings.model_validate(SHORT)
    die(5)
    with pytest.raises(KilledError):
        go(tmp_path, "stopped", Finetune(), settings, rows)
    die(-1)
    folder = tmp_path / "unfinished" / "k" / "1"
    (file,) = folder.glob("*.safetensors")
    damaged = file if what == "file" else folder / CHECKPOINT_FILE
    content = damaged.read_bytes()
    damaged.write_bytes(content.replace(b'"step": 5', b'"step": 4') if what == "step" else content[:-10])
    lines = []
    restarted = go(tmp_path, "again", Finetune(), settings, rows, lines)
    assert any(str(folder) in line for line in lines)
    assert same(weights(uninterrupted.out), weights(restarted.out))


def test_full_disk_skips_checkpoint_and_training_continues(tmp_path, rows, monkeypatch, uninterrupted):
    def full(tensors, path, metadata):
        path.write_bytes(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    settings, lines = FinetuneSettings.model_validate(SHORT), []
    monkeypatch.setattr(checkpoints, "save_file", full)
    ctx = go(tmp_path, "full", Finetune(), settings, rows, lines)
    assert "No space left on device" in lines[0]
    assert same(weights(uninterrupted.out), weights(ctx.out))
    assert not list(tmp_path.glob("unfinished/k/*"))


def test_disk_filling_up_later_keeps_previous_checkpoint(tmp_path, rows, monkeypatch, die, uninterrupted):
    settings, lines, save = FinetuneSettings.model_validate(SHORT), [], checkpoints.save_file

    def full_after_two(tensors, path, metadata):
        save(tensors, path, metadata)
        if path.name != "1.safetensors" and path.name != "2.safetensors":
            path.write_bytes(b"some")
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full_after_two)
    die(5)
    with pytest.raises(KilledError):
        go(tmp_path, "stopped", Finetune(), settings, rows)
    die(-1)
    monkeypatch.setattr(checkpoints, "save_file", save)
    assert sorted(p.name for p in tmp_path.glob("unfinished/k/*/*")) == ["2.safetensors", CHECKPOINT_FILE]
    resumed = go(tmp_path, "again", Finetune(), settings, rows, lines)
    assert any(re.search(r"step 2\b", line) for line in lines)
    assert same(weights(uninterrupted.out), weights(resumed.out))


def test_short_training_writes_no_checkpoint(tmp_path, rows):
    settings = FinetuneSettings.model_validate(SHORT | {"checkpoint_interval_minutes": 5})
    go(tmp_path, "short", Finetune(), settings, rows)
    assert not (tmp_path / "unfinished").exists()


def test_checkpoint_of_different_plan_is_not_resumed(tmp_path, rows, die):
    die(5)
    with pytest.raises(KilledError):
        go(tmp_path, "stopped", Finetune(), FinetuneSettings.model_validate(SHORT), rows)
    die(-1)
    lines = []
    other = FinetuneSettings.model_validate(SHORT | {"batch_size": 2})
    assert go(tmp_path, "again", Finetune(), other, rows, lines).details["training"]["steps"] == STEPS
    assert lines == []


@pytest.mark.quick
def test_checkpoint_interval_is_not_in_key():
    settings = [
        FinetuneSettings.model_validate({"checkpoint_interval_minutes": m}).model_dump(mode="json")
        for m in (0, None, 5)
    ]
    assert settings[0] == settings[1] == settings[2] == FinetuneSettings().model_dump(mode="json")


RECIPE = """
model: m
task: translation
data: {train: rows.jsonl, validation: rows.jsonl, test: rows.jsonl}
stages:
  - finetune: {max_steps: 12, batch_size: 4, precision: fp32, learning_rate: 0.001, num_evals: 2,
              checkpoint_interval_minutes: 0}
score: {quality: [chrf], latency: false, generation: {max_new_tokens: 4}}
device: cpu
threads: 1
"""


@pytest.mark.skipif(os.name == "nt", reason="signals as POSIX has them")
def test_killed_run_resumes_and_cleans_up(tmp_path):
    """In a process of its own, because nothing in this one can be killed."""
    tiny.write_marian(tmp_path / "m")
    tiny.write_pairs(tmp_path / "rows.jsonl")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    before = (
        f"import os, signal; os.chdir({str(tmp_path)!r})\n"
        "from smelt.training import checkpoints\n"
        "write = checkpoints.write_checkpoint\n"
        "def then_die(folder, identity, step, *rest):\n"
        "    write(folder, identity, step, *rest)\n"
        "    if step == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoints.write_checkpoint = then_die\n"
    )
    code, output = shared_server().run("run", "recipe.yaml", "--out", "runs/a", "--quiet", before=before)
    assert code == -signal.SIGKILL, output
    store = tmp_path / "runs" / ".store"
    assert len(list(store.glob("unfinished/*/1/4.safetensors"))) == 1
    listing = harness.smelt("store", "list", "--store", store, code=0).output
    (folder,) = list_step_checkpoints(store)
    assert f"MB  {folder.name[:8]}" in listing
    recipe = tmp_path / "recipe.yaml"
    harness.smelt("run", recipe, "--out", tmp_path / "runs" / "a", "--quiet", code=0)
    assert "step 4 " in (tmp_path / "runs" / "a" / "log.txt").read_text()
    assert not list((store / "unfinished").iterdir())
    harness.smelt("run", recipe, "--out", tmp_path / "other" / "b", "--quiet", code=0)
    folders = [tmp_path / run_folder / "artifacts" / "finetune" for run_folder in ("runs/a", "other/b")]
    assert same(*map(weights, folders))


@pytest.mark.skipif(os.name == "nt", reason="signals as POSIX has them")
def test_sigterm_writes_checkpoint_and_exits_with_143(tmp_path):
    """As Slurm, Kubernetes and systemd send it; no checkpoint would be due for an hour."""
    tiny.write_marian(tmp_path / "m")
    tiny.write_pairs(tmp_path / "rows.jsonl")
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("minutes: 0}", "minutes: 60}"))
    before = (
        f"import os, signal; os.chdir({str(tmp_path)!r})\n"
        "from smelt.training.checkpoint_selector import CheckpointSelector\n"
        "begin = CheckpointSelector.on_step_begin\n"
        "def terminate(self, args, state, control, **kwargs):\n"
        "    if state.global_step == 2: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return begin(self, args, state, control, **kwargs)\n"
        "CheckpointSelector.on_step_begin = terminate\n"
    )
    code, output = shared_server().run("run", "recipe.yaml", "--out", "runs/a", "--quiet", before=before)
    assert code == 143, output
    report = json.loads((tmp_path / "runs" / "a" / "report.json").read_text())
    assert report["status"] == "interrupted"
    store = tmp_path / "runs" / ".store"
    assert len(list(store.glob("unfinished/*/1/3.safetensors"))) == 1
    assert not list((store / "tmp").iterdir())
    recipe = tmp_path / "recipe.yaml"
    harness.smelt("run", recipe, "--out", tmp_path / "runs" / "a", "--quiet", code=0)
    assert "step 3 " in (tmp_path / "runs" / "a" / "log.txt").read_text()
    harness.smelt("run", recipe, "--out", tmp_path / "other" / "b", "--quiet", code=0)
    folders = [tmp_path / run_folder / "artifacts" / "finetune" for run_folder in ("runs/a", "other/b")]
    assert same(*map(weights, folders))
