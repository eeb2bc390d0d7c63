"""Steps and trials as tasks of a Ray cluster: three nodes on this machine, each with a store of its own.

A cluster takes seconds to start, and the first task of a node imports torch, so all tests share one. Nodes
are killed while a metric of the recipe holds a task.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock, patch

import psutil
import pytest

from smelt.core.artifact import read_artifact
from smelt.core.errors import InputError, MissingDependencyError
from smelt.core.messages import message_codes
from smelt.core.remote_store import open_remote_store
from smelt.core.store import Store
from smelt.core.system import TerminatedError, sigterm_as_error, sigterm_handler_kept
from smelt.evaluate.report.schema import validate_report
from smelt.pipeline.execute import cluster_run, ray_cluster, training_worker
from smelt.pipeline.execute.cluster_run import ClusterRun
from smelt.pipeline.execute.display import Display
from smelt.pipeline.execute.ray_cluster import NodeRequest, TaskNeeds, open_cluster
from smelt.pipeline.execute.scoring import Scorer
from smelt.pipeline.execute.step_runner import StepRunner
from smelt.pipeline.execute.training_processes import TrainingLaunch
from smelt.pipeline.plan.costs import estimate_steps
from smelt.pipeline.plan.load_plan import load_plan
from smelt.pipeline.recipe.recipe import ResourceSettings
from smelt.pipeline.search.space import read_space
from smelt.pipeline.search.study import Search, SearchOptions
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import tiny
from tests.support.pairs.matrix import is_full_matrix

# `hold.py` blocks the first call that scores so many texts as the file `hold` says, and writes its process
HOLD = """
import os, pathlib, time

HOME = pathlib.Path(__file__).parent

def length(outputs, references, sources):
    hold = HOME / "hold"
    if hold.exists() and hold.read_text() == str(len(outputs)):
        try:
            hold.rename(HOME / "held")
        except FileNotFoundError:
            return 1.0
        (HOME / "process").write_text(str(os.getpid()))
        while (HOME / "held").exists():
            time.sleep(0.05)
    return float(sum(map(len, outputs)))
"""
pytestmark = pytest.mark.slow
RECIPE = """
model: m
task: translation
threads: 1
data: {train: train.jsonl, validation: validation.jsonl, test: test.jsonl}
stages:
  - finetune: {max_steps: 2, batch_size: 4, num_evals: 1, metric_for_best_model: "hold:length"}
  - quantize: {scheme: int8-dynamic}
    from: model
  - prune: {targets: [ffn], keep_ratio: 0.5}
    from: finetune
gates: {on: test}
score: {quality: [chrf, "hold:length"], generation: {max_new_tokens: 6}, latency: false, sqnr_samples: 0}
"""
ROWS = {"train": 8, "validation": 6, "test": 5}


def make_home(folder):
    tiny.write_marian(folder / "m")
    for name, rows in ROWS.items():
        tiny.write_pairs(folder / f"{name}.jsonl", rows)
    (folder / "hold.py").write_text(HOLD)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory.mktemp("home"))


class Nodes:
    """A running cluster. `address` as for --executor."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder, self.count = cluster, folder, 0
        self.address = ""

    def add(self, **options):
        """Add a node with a store of its own."""
        self.count += 1
        store = {ray_cluster.STORE_VARIABLE: str(self.folder / f"node{self.count}")}
        with sigterm_handler_kept():
            return self.cluster.add_node(object_store_memory=80_000_000, env_vars=store, **options)

    def nodes_of(self, process):
        """Return the node that runs a process, in a list; an empty one for another process."""
        above = {parent.pid for parent in psutil.Process(process).parents()}
        return [
            node
            for node in self.cluster.worker_nodes
            if above
            & {node_process.process.pid for parent in node.all_processes.values() for node_process in parent}
        ]

    def kill_node_of(self, process):
        """Kill the node that runs a process."""
        [node] = self.nodes_of(process)
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    import ray
    from ray.cluster_utils import Cluster

    # Ray's tasks are polite by default (nice 15): next to other tests they would get no processor
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
    with patch.dict(os.environ, environment):
        cluster_nodes = Nodes(Cluster(), tmp_path_factory.mktemp("nodes"))
        try:
            # the head, where the driver runs, notices a dead node within seconds
            config = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000}
            # idle workers, of which every node would start some, take seconds of its processor each
            config |= {"health_check_failure_threshold": 3, "enable_worker_prestart": False}
            cluster_nodes.add(num_cpus=0, include_dashboard=False, _system_config=config)
            for _ in range(2):
                cluster_nodes.add(num_cpus=1)
            cluster_nodes.address = f"ray://{cluster_nodes.cluster.address}"
            open_cluster(cluster_nodes.address)
            yield cluster_nodes
        finally:
            ray.shutdown()
            cluster_nodes.cluster.shutdown()
            open_cluster.cache_clear()
            ray_cluster._remote_function.cache_clear()


def run(home, out, store, *more, recipe="recipe.yaml"):
    result = harness.smelt("run", home / recipe, "--quiet", "--out", out, "--store", store, *more)
    report = json.loads((out / "report.json").read_text())
    validate_report(report)
    assert result.exit_code == 0, result.output
    return report


def statuses(report):
    return {step["name"]: step["status"] for step in report["steps"]}


@pytest.fixture(scope="module")
def alone(home, tmp_path_factory):
    """The report of the recipe without a cluster."""
    return run(home, tmp_path_factory.mktemp("alone") / "run", tmp_path_factory.mktemp("alone-store"))


@pytest.fixture
def hold(home, nodes):
    """Hold the next task that scores the samples of a split; returns its process."""

    def start(split):
        (home / "process").unlink(missing_ok=True)
        (home / "held").unlink(missing_ok=True)
        (home / "hold").write_text(str(ROWS[split]))

    def process(check=lambda: None):
        until = time.monotonic() + 300
        while not (home / "process").exists() or not (home / "process").read_text():
            check()
            assert time.monotonic() < until, "no task was held"
            time.sleep(0.05)
        return int((home / "process").read_text())

    for old_path in nodes.folder.glob("node*/*/*"):  # of earlier tests, whose steps are the same
        if old_path.parent.name in ("artifacts", "scores", "checked"):
            shutil.rmtree(old_path) if old_path.is_dir() else old_path.unlink()
    yield start, process
    for name in ("hold", "held"):
        (home / name).unlink(missing_ok=True)


def test_killed_node_and_driver_lose_only_running_tasks(home, nodes, alone, tmp_path, hold):
    """The node dies in a training, which scores validation samples; the driver while its model is scored."""
    start, process = hold
    start("validation")
    bucket, scores = f"file://{tmp_path}/bucket", tmp_path / "bucket" / "scores"
    command = ["run", home / "recipe.yaml", "--out", tmp_path / "one" / "run", "--store", bucket]
    with (tmp_path / "driver.log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-P", "-m", "smelt", *map(str, command), "--executor", nodes.address],
            stdout=log, stderr=log,
        )  # fmt: skip

    def runs():
        return driver.poll() is None or pytest.fail((tmp_path / "driver.log").read_text())

    task = process(runs)
    until = time.monotonic() + 300
    while len(list(scores.glob("*.json"))) < 2:  # of the model, and of the branch beside the training
        assert runs()
        assert time.monotonic() < until
        time.sleep(0.05)
    start("test")
    nodes.kill_node_of(task)
    nodes.add(num_cpus=1)
    task = process(runs)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    psutil.wait_procs([psutil.Process(task)] if psutil.pid_exists(task) else [], timeout=60)
    assert not psutil.pid_exists(task)  # Ray ends the tasks of a dead driver
    (home / "held").unlink(missing_ok=True)

    report = run(home, tmp_path / "one" / "run", bucket, "--executor", nodes.address)
    of_steps = statuses(report)
    # a free node may have pruned the model while its scoring was held
    assert of_steps.pop("prune") in ("done", "cached")
    assert of_steps == {"model": "cached", "finetune": "cached", "quantize": "cached"}
    for name in ("quality", "size_bytes", "agreement", "parent", "parameters"):
        assert [step[name] for step in report["steps"]] == [step[name] for step in alone["steps"]], name
    artifacts = {
        step["name"]: read_artifact(tmp_path / "one" / "run" / step["artifact"]) for step in report["steps"]
    }
    keys = {artifact.key for artifact in artifacts.values()}
    assert {path.name for path in (tmp_path / "one" / ".store" / "artifacts").iterdir()} == keys
    # each step was built in the store of a node
    assert {path.name for path in nodes.folder.glob("node*/artifacts/*")} >= keys
    second_report = run(home, tmp_path / "two" / "run", bucket, "--executor", nodes.address)
    assert list(statuses(second_report).values()) == ["cached"] * 4


def test_search_trials_run_concurrently(home, nodes, tmp_path):
    text = RECIPE.split("stages:", maxsplit=1)[0] + (
        "stages:\n  - quantize: {scheme: {search: {choices: [int8-dynamic, int4]}}}\n"
        "score: {quality: [chrf], generation: {max_new_tokens: 6}, latency: false, sqnr_samples: 0}\n"
        "search: {minimize: size, sampler: grid}\n"
    )
    (home / "space.yaml").write_text(text)
    space = read_space(home / "space.yaml")
    trials_by_executor = []
    for name, executor in (("cluster", nodes.address), ("alone", None)):
        options = SearchOptions(tmp_path / name, f"file://{tmp_path}/{name}-bucket", executor=executor)
        lines = []
        assert Search(space, options).run(lines.append) == "exhausted"
        job = Search(space, options)
        trials_by_executor.append(
            {t.parameters["quantize.scheme"]: t.result.values for t in job.finished_trials()}
        )
        order = [line.endswith(": starts") for line in lines if line.startswith("trial ")]
        assert order[:2] == [True, executor is not None]
    assert len(trials_by_executor[0]) == 2
    assert trials_by_executor[0] == trials_by_executor[1]


DIVIDED = """
model: m
task: translation
threads: 1
device: cpu
data: {train: train.jsonl, validation: validation.jsonl, test: test.jsonl}
stages:
  - finetune: {max_steps: 40, batch_size: 4, num_evals: 1, dropout: 0.0, precision: fp32,
               checkpoint_interval_minutes: 0}
score: {quality: [chrf], generation: {max_new_tokens: 6}, latency: false, sqnr_samples: 0}
"""


def rank_process(nodes, number):
    """Return the id of the process of a training on the nodes with this number, once there is one."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            trains = training_worker.__name__ in process.cmdline()
            if trains and process.environ()["RANK"] == number and nodes.nodes_of(process.pid):
                return process.pid
    return None


@pytest.mark.skipif(not is_full_matrix(), reason="two minutes: with SMELT_MATRIX=all")
def test_two_process_training_resumes_on_another_node(home, nodes, tmp_path):
    """One task reserves the CPUs of both. The losses are those of one process."""
    (home / "divided.yaml").write_text(DIVIDED)
    recipe, store = "divided.yaml", tmp_path / "store"
    single_report = run(home, tmp_path / "alone", tmp_path / "alone-store", recipe=recipe)
    options = ("--executor", nodes.address, "--num-processes", "2")
    nodes.add(num_cpus=2)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, home, tmp_path / "two", store, *options, recipe=recipe)
        until = time.monotonic() + 300
        while (
            not list(store.glob("unfinished/**/checkpoint.json"))
            or (second := rank_process(nodes, "1")) is None
        ):
            assert time.monotonic() < until
            time.sleep(0.01)
        nodes.kill_node_of(second)
        nodes.add(num_cpus=2)
        report = running.result()
    assert statuses(report) == {"model": "done", "finetune": "done"}
    first_training, two = (
        run_report["steps"][-1]["details"]["training"] for run_report in (single_report, report)
    )
    assert two["processes"] == 2
    assert two["curve"]["train_loss"] == pytest.approx(
        first_training["curve"]["train_loss"], abs=1e-5, rel=2e-5
    )
    log = (tmp_path / "two" / "log.txt").read_text()
    assert ("learning rate" in log, "resuming from step" in log) == (True, True)


def test_connection_keeps_handler_of_sigterm(nodes):
    with sigterm_as_error():
        open_cluster.cache_clear()
        open_cluster(nodes.address)
        with pytest.raises(TerminatedError):
            signal.raise_signal(signal.SIGTERM)


def test_more_processes_than_a_node_fits_are_rejected(home, nodes, tmp_path):
    plan, store = load_plan(home / "recipe.yaml", ["launch.num_processes=3"]), Store(tmp_path / "store")
    scorer = Scorer(store, plan.recipe.task, ("chrf",), plan.recipe.score.generation, 8, 1)
    runner = StepRunner(store, plan.recipe.task, {}, 0, 1, scorer, Display(quiet=True))
    with raises_code("no-node-fits", InputError):
        ClusterRun(open_cluster(nodes.address), plan, {}, runner, scorer, Display(quiet=True), print, True)


def _measured(job, data, *arguments):
    import ray

    start_time = time.time()
    time.sleep(0.3)
    cpus = ray.get_runtime_context().get_assigned_resources()["CPU"]
    times = {"began": start_time, "ended": time.time(), "cpus": cpus}
    return cluster_run.TaskOutcome(key="k", result=times, node="a node")


def test_latency_is_measured_on_marked_nodes_one_at_a_time(home, nodes, tmp_path, monkeypatch):
    from ray import cloudpickle

    plan, messages, measurements = load_plan(str(home / "recipe.yaml")), [], []
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(cluster_run, "latency_task", _measured)
    store, recipe, display = Store(tmp_path / "store"), plan.recipe, Display(quiet=True)
    scorer = Scorer(store, recipe.task, ("chrf",), recipe.score.generation, 8, 1)
    runner = StepRunner(store, recipe.task, {}, 0, 1, scorer, display)
    run = ClusterRun(open_cluster(nodes.address), plan, {}, runner, scorer, display, messages.append, True)
    measure = lambda: measurements.append(run.measure_latency({}, "model", False, frozenset(), 1.0))  # noqa: E731
    measure()
    assert measurements.pop() is None  # no node is marked, so the driver measures
    marked = nodes.add(num_cpus=2, resources={"latency": 1})
    try:
        threads = [threading.Thread(target=measure) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        nodes.cluster.remove_node(marked, allow_graceful=False)
    first, second = sorted(measurements, key=lambda each: each["began"])
    assert first["ended"] <= second["began"]
    assert {first["cpus"], second["cpus"]} == {2.0}  # nothing else runs there meanwhile
    assert message_codes(messages) == ["latency-on-node"] * 2


@pytest.mark.parametrize(
    ("keys", "code"),
    [({"resources": {"cpus": 64}}, "no-node-fits"), ({"resources": {"gpus": 1}}, "no-node-fits")],
)
def test_unsatisfiable_resources_are_rejected(nodes, keys, code):
    with raises_code(code, InputError):
        open_cluster(nodes.address).task_needs(ResourceSettings(**keys["resources"]), 1, "auto")


def test_nodes_are_checked_before_run(nodes, tmp_path, monkeypatch):
    cluster, store = open_cluster(nodes.address), Store(tmp_path / "store")
    cluster.check_nodes(store, [tmp_path])
    with raises_code("missing-on-node", InputError) as excinfo:
        cluster.check_nodes(store, [tmp_path / "teacher"])
    assert len(excinfo.value.messages) == len(cluster.nodes())
    answers = cluster._ask_nodes(NodeRequest(tmp_path / "other", None, tmp_path / "token", ()))
    problems = [
        problem
        for name, node_answer in answers.items()
        for problem in ray_cluster._node_problems(name, node_answer)
    ]
    assert set(message_codes(problems)) == {"store-not-shared"}
    with raises_code("store-not-shared", InputError):
        cluster.check_nodes(Store(tmp_path / "store", open_remote_store("memory://x")), [tmp_path])
    versions = ray_cluster._versions()
    monkeypatch.setattr(ray_cluster, "_versions", lambda: versions | {"torch": "1.0", "onnx": "0"})
    with raises_code("cluster-versions-differ", InputError) as excinfo:
        cluster.check_nodes(store, [tmp_path, tmp_path])
    assert set(message_codes(excinfo.value.messages)) == {"cluster-versions-differ"}


@pytest.mark.parametrize("executor", ["dask", "ray://", "ray://head", "ray:head:1"])
def test_unknown_executor_is_rejected(executor):
    with raises_code("unknown-executor", InputError):
        open_cluster(executor)


def test_unreachable_cluster_is_rejected(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nothing listens
        with raises_code("executor-unreachable", InputError):
            open_cluster(f"ray://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setattr(ray_cluster, "package_problem", lambda name, oldest: f"{name} is not installed")
    with raises_code("not-installed", MissingDependencyError):
        open_cluster("ray")


def test_task_needs_are_counted_by_node_resources():
    needs = TaskNeeds(2, 1, 8_000_000_000)
    assert needs.count_on({"CPU": 8, "GPU": 3, "memory": 20e9}) == 2
    assert needs.count_on({"CPU": 8, "memory": 20e9}) == 0
    assert TaskNeeds(2, 0, None).count_on({"CPU": 7}) == 3
    assert needs.options() == {"num_cpus": 2, "num_gpus": 1, "memory": 8_000_000_000}


def test_estimated_memory_is_reserved_if_it_fits(monkeypatch):
    resources = [{"CPU": 0, "memory": 90e9}, {"CPU": 4, "memory": 20e9}, {"CPU": 4, "memory": 8e9}]
    monkeypatch.setattr(
        ray_cluster.RayCluster, "nodes", lambda self: [{"Resources": each} for each in resources]
    )
    cluster, needs = object.__new__(ray_cluster.RayCluster), TaskNeeds(1, 0, None)
    reserved = {
        gigabytes: cluster.with_memory(needs, int(gigabytes * 1e9)).memory_bytes for gigabytes in (6, 30)
    }
    assert reserved == {6: 6e9, 30: 20e9}
    assert cluster.node_bytes == 20e9


def test_step_reserves_estimated_memory_without_memory_setting(home):
    bare = object.__new__(ClusterRun)
    bare._needs, bare._launch_needs, bare._cluster = TaskNeeds(1, 0, None), TaskNeeds(2, 0, None), Mock()
    bare._cluster.with_memory = lambda needs, memory: replace(needs, memory_bytes=memory)
    for settings in ((), ("resources.memory_gb=1",)):
        bare._plan = plan = load_plan(home / "recipe.yaml", ["launch.num_processes=2", *settings])
        bare._launch, bare._estimates = TrainingLaunch(plan), estimate_steps(plan, plan.splits)
        reserved = {step.name: bare._step_needs(step) for step in plan.steps}
        assert [reserved[name].cpus for name in ("finetune", "quantize")] == [2, 1]
        for name, needs in reserved.items():
            estimate = bare._estimates[name].size.memory_bytes + 560_000_000
            assert needs.memory_bytes is None if settings else needs.memory_bytes >= estimate
