"""Training stages in several processes: started by a run, or by torchrun."""

import gzip
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import psutil
import pytest

import smelt
from smelt.core.errors import RunError
from smelt.core.store import Store
from smelt.pipeline.execute import training_processes, training_worker
from smelt.pipeline.execute.step_runner import recipe_scorer, recipe_step_runner
from smelt.pipeline.plan import run_checks
from smelt.pipeline.plan.load_plan import load_plan
from smelt.pipeline.search.shrink import shrink
from smelt.pipeline.search.study import Search
from smelt.training import processes
from smelt.training.processes import external_machines, external_processes, external_rank
from tests.support import harness
from tests.support.expected_errors import error_codes, raises_code
from tests.support.models import tiny
from tests.support.pairs.matrix import is_full_matrix

RECIPE = """
model: model
task: translation
device: cpu
threads: 1
data: {train: rows.jsonl, validation: rows.jsonl, test: rows.jsonl}
stages:
  - finetune: {max_steps: 12, num_evals: 2, batch_size: 4, precision: fp32, dropout: 0.0,
               checkpoint_interval_minutes: 0}
score: {latency: false, generation: {max_new_tokens: 4}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    tiny.write_marian(folder / "model")
    tiny.write_pairs(folder / "rows.jsonl", rows=12)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def alone(home):
    """The training of one process."""
    return training(
        smelt.run(home / "recipe.yaml", out=home / "runs" / "alone", store=home / "alone", quiet=True)
    )


def training(result):
    (step,) = [s for s in result.report["steps"] if s["name"] == "finetune"]
    assert step["status"] == "done", step["error"]
    return step["details"]["training"]


def same_losses(one, two):
    return one["curve"]["train_loss"] == pytest.approx(two["curve"]["train_loss"], abs=1e-5, rel=2e-5)


def rank_process(rank):
    """Return the process of a rank that trains, below this process; None if there is none."""
    for process in psutil.Process().children(recursive=True):
        try:
            if training_processes._WORKER_MODULE in process.cmdline() and process.environ().get(
                "RANK"
            ) == str(rank):
                return process
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return None


def test_killed_process_ends_step_and_next_run_resumes(home, alone):
    out, store = home / "runs" / "two", home / "two"
    stopped = threading.Event()

    def kill():
        while not stopped.is_set():
            saved = list((store / "unfinished").rglob("checkpoint.json"))
            if saved and (process := rank_process(1)) is not None:
                process.kill()
                return
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    options = {"overrides": ["launch.num_processes=2"], "out": out, "store": store, "quiet": True}
    result = smelt.run(home / "recipe.yaml", **options)
    stopped.set()
    killer.join()
    (step,) = [s for s in result.report["steps"] if s["name"] == "finetune"]
    assert step["error"]["code"] == "training-process-died"
    assert [rank_process(rank) for rank in (0, 1)] == [None, None]
    (note,) = (store / "unfinished").rglob("checkpoint.json")
    reached = json.loads(note.read_text())["step"]
    result = smelt.run(home / "recipe.yaml", **(options | {"overrides": []}))  # in one process
    assert same_losses(training(result), alone)
    log = (out / "log.txt").read_text()
    assert f"resuming from step {reached}" in log
    assert not list((store / "unfinished").rglob("checkpoint.json"))


def test_process_with_different_step_is_rejected(home, alone, tmp_path):
    plan = load_plan(home / "recipe.yaml")
    store = Store(tmp_path / "store")
    runner = recipe_step_runner(plan.recipe, store, plan.read_data(), recipe_scorer(plan.recipe, store), None)
    model = home / "runs" / "alone" / "artifacts" / "model"
    job = {"step": "finetune", "key": "f" * 64, "ancestors": {"model": str(model)}}
    with raises_code("ranks-differ"):
        training_worker._train_step(runner, plan, job, None, tmp_path)


def test_torchrun_processes_serve_stages_of_rank_zero(home, alone):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    out = home / "runs" / "external"
    more = ["--out", out, "--store", home / "external"]
    if is_full_matrix():  # four more processes
        more += ["--set", "launch.scoring=true"]
    command = [sys.executable, "-m", "smelt", "run", home / "recipe.yaml", *more]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    running = [
        subprocess.Popen(command, text=True,
                         env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank},
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in "01"
    ]  # fmt: skip
    outputs = [process.communicate(timeout=500)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    report = json.loads((out / "report.json").read_text())
    (step,) = [s for s in report["steps"] if s["name"] == "finetune"]
    assert same_losses(step["details"]["training"], alone)
    # the model's own scores: also the outputs are those of one process
    scores = [
        json.loads(gzip.decompress((home / "runs" / run / "scores" / "model.json.gz").read_bytes()))
        for run in ("alone", "external")
    ]
    assert scores[0] == scores[1]


@pytest.mark.quick
def test_external_ranks_are_read_from_environment_and_python_runs_rejected(home, monkeypatch, tmp_path):
    assert (external_processes(), external_rank()) == (0, 0)
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_NNODES", "2")
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert external_processes() == 0  # a batch script, without srun
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    monkeypatch.delenv("MASTER_ADDR")
    assert external_processes() == 0  # srun without an address: independent runs
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert (external_processes(), external_machines(), external_rank()) == (4, 2, 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert external_machines() == 4
    with raises_code("started-by-launcher"):
        smelt.run(home / "recipe.yaml", out=tmp_path / "run", quiet=True)
    monkeypatch.setenv("SLURM_PROCID", "0")
    with raises_code("started-by-launcher"):
        smelt.run(home / "recipe.yaml", out=tmp_path / "run", quiet=True, executor="ray")
    monkeypatch.setenv("SLURM_PROCID", "3")
    for search in (Search.check, shrink):
        with raises_code("started-by-launcher"):
            search(*[None] * len(inspect.signature(search).parameters))
    monkeypatch.setattr(training_processes, "_CONNECT_SECONDS", 0.5)
    monkeypatch.setenv("MASTER_PORT", "1")
    with raises_code("no-connection"):
        training_processes.serve_training(load_plan(home / "recipe.yaml"))


@pytest.mark.quick
def test_more_processes_than_gpus_are_rejected_before_run(home, monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "cuda_device_count", lambda: 2)
    options = {"out": tmp_path / "run", "quiet": True}
    with raises_code("too-few-gpus"):
        smelt.run(home / "recipe.yaml", overrides=["launch.num_processes=3", "device=auto"], **options)
    assert not (tmp_path / "run").exists()
    planned = ("--num-processes", 3, "--set", "device=auto", "--out", tmp_path / "run")
    assert harness.smelt("plan", home / "recipe.yaml", *planned, code=2).error.code == "too-few-gpus"
    processes.require_gpus(processes.LaunchSettings(num_processes=3), "cpu")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("lack", "strategy", "setting", "code"),
    [("it is not installed", "deepspeed", "seed=1", "not-installed"),
     (None, "deepspeed", "finetune.optimizer=adafactor", "not-with-strategy"),
     (None, "deepspeed", "seed=1", "not-with-strategy"),  # the recipe wants checkpoints
     (None, "fsdp", "finetune.learned_masks={keep_ratio: 0.5}", "not-with-strategy"),
     (None, "fsdp", "finetune.qat={scales: lsq}", "not-with-strategy")],
)  # fmt: skip
def test_unavailable_strategy_is_rejected_before_run(home, monkeypatch, lack, strategy, setting, code):
    monkeypatch.setattr(run_checks, "package_problem", lambda package, oldest: lack)
    launch = ("--num-processes", 2, "--set", f"launch.strategy={strategy}", "--set", setting)
    assert code in error_codes(harness.smelt("plan", home / "recipe.yaml", *launch, code=2).error)


@pytest.mark.quick
def test_fp16_without_gpu_is_rejected_before_run(home, monkeypatch):
    setting = ["finetune.precision=fp16"]
    with raises_code("no-fp16"):
        load_plan(home / "recipe.yaml", setting)
    monkeypatch.setattr(run_checks, "training_device", lambda requested: "cuda")
    assert load_plan(home / "recipe.yaml", setting).steps


@pytest.mark.quick
def test_failures_of_other_machines_report_cause_and_output(tmp_path):
    failure = {
        "code": "unexpected",
        "message": "process 2: RuntimeError: closed",
        "setting": None,
        "exit_code": 1,
    }
    failures = {1: {"code": None, "exit": -9, "output": "killed"},
                2: failure | {"time": 1.0, "exit": 1, "output": "closed"}}  # fmt: skip
    training_processes._write_failures(tmp_path, 1, failures)
    error = training_processes._first_error(tmp_path, "finetune")
    assert error.code == "training-process-died"
    assert training_processes._log_tails(tmp_path) == {"1": "killed", "2": "closed"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("environment", "processes", "threads"),
    [({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2", "SLURM_CPUS_PER_TASK": "6"}, "3", "6"),
     ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1", "OMP_NUM_THREADS": "1"}, "4", "1"),
     ({"RANK": "0", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, "2", "5")],
)  # fmt: skip
def test_processes_and_threads_per_node_are_read_from_environment(
    monkeypatch, environment, processes, threads
):
    for name in ("RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(10)))
    for _ in range(2):  # also once the run has removed torchrun's limit
        environment_of_rank = training_processes._environment_of_rank({"port": 1}, None)
        assert (environment_of_rank["LOCAL_WORLD_SIZE"], environment_of_rank["OMP_NUM_THREADS"]) == (
            processes,
            threads,
        )
        training_processes.use_all_cores()
    assert ("OMP_NUM_THREADS" in os.environ) == ("SLURM_NODEID" in environment and threads == "1")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("code", "is_kept"), [("unexpected", True), ("out-of-memory", True), ("non-finite-loss", False)]
)
def test_checkpoints_are_kept_after_machine_failures_only(home, alone, tmp_path, code, is_kept):
    class Failing:
        def applies_to(self, step):
            return True

        def train(self, *_):
            raise RunError("failed", code=code)

    plan, store = load_plan(home / "recipe.yaml"), Store(tmp_path / "store")
    runner = recipe_step_runner(
        plan.recipe, store, plan.read_data(), recipe_scorer(plan.recipe, store), Mock(), Failing()
    )
    model = training_worker._artifact(home / "runs" / "alone" / "artifacts" / "model")
    step = plan.step("finetune")
    checkpoint = store.root / "unfinished" / runner.step_key(step, {"model": model}) / "1"
    checkpoint.mkdir(parents=True)
    with raises_code(code):
        runner.run_step(step, {"model": model}, fresh=False)
    assert checkpoint.exists() == is_kept


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "two"), ("RANK", "two"), ("RANK", "2"), ("RANK", "-1"), ("MASTER_PORT", "two"),
        ("LOCAL_WORLD_SIZE", "²"), ("LOCAL_RANK", "²"), ("SLURM_STEP_TASKS_PER_NODE", "4(x²)"),
    ],
)  # fmt: skip
def test_invalid_launcher_variables_are_rejected(monkeypatch, name, value):
    """A rank beyond the number of processes would be waited for, without a word."""
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "1"}
    for variable, text in (variables | {name: value}).items():
        monkeypatch.setenv(variable, text)
    with raises_code("no-connection"):
        if name == "MASTER_PORT":
            training_processes._key_value_store()
        external_rank()
        external_machines()
        training_processes._environment_of_rank({"port": 1}, None)
