"""Connect to a Ray cluster, and check its nodes before work starts: `--executor ray[://HOST:PORT]`.

Ray is imported only here and in `cluster_run`, and only with `--executor`. Nodes share nothing but the store:
a folder at one path, or a remote store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from smelt.core.errors import InputError, MissingDependencyError, combined_error
from smelt.core.files import json_hash, sha256_of
from smelt.core.messages import Message, error_message, with_count
from smelt.core.remote_store import open_remote_store
from smelt.core.store import Store
from smelt.core.system import install_command, package_problem, package_versions, sigterm_handler_kept
from smelt.pipeline.execute.step_runner import KEY_LIBRARIES
from smelt.pipeline.recipe.recipe import ResourceSettings

OLDEST_RAY = "2.50"
LATENCY_RESOURCE = "latency"
"""Custom resource of the nodes on which latency is measured."""
STORE_VARIABLE = "SMELT_STORE"
"""On a node: the local folder of a remote store (default: the driver's path, else ~/.cache/smelt/store)."""
_CONNECT_S = 5.0
_CHECK_S = 120.0  # of all nodes; the first process on a node imports smelt
_LEAVING_S = 15.0
_EXECUTOR = re.compile(r"ray(://(?P<address>[^/\s]+:\d+))?")
_SOURCES = ("smelt", "smelt.compress", "smelt.export", "smelt.evaluate")


@dataclass(frozen=True)
class TaskNeeds:
    """What a task reserves on a node. memory_bytes: None: nothing."""

    cpus: float
    gpus: float
    memory_bytes: int | None

    def options(self) -> dict[str, Any]:
        """Return them as options of a Ray task."""
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        return options if self.memory_bytes is None else options | {"memory": self.memory_bytes}

    def count_on(self, resources: Mapping[str, float]) -> int:
        """Return how many such tasks fit on a node with these resources at once."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory_bytes or 0}
        return int(min((resources.get(name, 0) // n for name, n in amounts.items() if n), default=1))

    def __str__(self) -> str:
        memory = "" if self.memory_bytes is None else f", {self.memory_bytes / 1e9:g} GB"
        return f"{self.cpus:g} CPUs, {self.gpus:g} GPUs{memory}"


@dataclass(frozen=True)
class NodeRequest:
    """What every node must have. paths: files and folders. token: a file in the store, if it is a folder."""

    store_root: Path
    store_url: str | None
    token: Path | None
    paths: tuple[Path, ...]


class RayCluster:
    """A connected cluster."""

    def __init__(self, address: str | None) -> None:
        """Connect. address: HOST:PORT of the head; None: the cluster of this machine, or a new one.

        Raises:
            InputError: `executor-unreachable`, also if versions of Ray or Python differ.
        """
        self.address = address
        self._checked: set[str] = set()
        self._lock = threading.Lock()
        self._data: dict[str, Any] = {}
        self._running: set[Any] = set()
        if address is not None:
            _require_answer(address)
        self._connect()

    def _connect(self) -> None:
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray puts the current folder on the import path of its processes (see `smelt.core.system`)
        with sigterm_handler_kept(), contextlib.chdir(sysconfig.get_paths()["purelib"]):
            try:
                ray.init(
                    address=self.address,
                    ignore_reinit_error=True,
                    logging_level=logging.ERROR,
                    log_to_driver=True,
                )
            except Exception as error:
                text = " ".join(str(error).split())[:400] or type(error).__name__
                raise InputError(
                    f"{self.address or 'ray'}: cannot join the cluster: {text} Start it with `ray start"
                    " --head`, run smelt on one of its machines, and install the same versions of Ray and"
                    " Python on all.",
                    code="executor-unreachable",
                ) from error

    def nodes(self) -> list[dict[str, Any]]:
        """Return the living nodes as Ray lists them: `NodeID`, `NodeManagerAddress`, `Resources`."""
        import ray

        return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]

    def put_data(self, key: str, data: Any) -> Any:
        """Return a reference to `data` in Ray's object store, put there once per key."""
        import ray

        with self._lock:
            if key not in self._data:
                self._data[key] = ray.put(data)
            return self._data[key]

    def start(self, work: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Start a task and return its reference, or its references."""
        references = _remote_function(work).options(**options).remote(*arguments)
        with self._lock:
            self._running.add(references[0] if isinstance(references, list) else references)
        return references

    def mark_ended(self, reference: Any) -> None:
        """Note that a task has ended."""
        with self._lock:
            self._running.discard(reference)

    def cancel_tasks(self, tasks: Iterable[Any] | None = None) -> None:
        """Cancel running tasks, by their references. tasks: None: all that were started."""
        import ray

        with self._lock:
            running = self._running & set(tasks) if tasks is not None else set(self._running)
            self._running -= running
        for reference in running:
            ray.cancel(reference, force=True)

    def task_needs(
        self, settings: ResourceSettings, threads: int | None, device: str, processes: int = 1
    ) -> TaskNeeds:
        """Return what a task with so many processes needs by the recipe, on one node.

        Defaults for each process: as many CPUs as `threads`, else the task has all of the smallest node; a
        GPU if the cluster has one and `device` is not cpu.

        Raises:
            InputError: no node has that much (`no-node-fits`).
        """
        resources = [node["Resources"] for node in self.nodes()]
        smallest = min(
            (node_resources["CPU"] for node_resources in resources if node_resources.get("CPU")), default=1
        )
        has_gpu = device != "cpu" and any(node_resources.get("GPU") for node_resources in resources)
        cpus, memory_gb = settings.cpus or threads, settings.memory_gb
        needs = TaskNeeds(
            smallest if cpus is None else processes * cpus,
            processes * (float(has_gpu) if settings.gpus is None else settings.gpus),
            None if memory_gb is None else int(processes * memory_gb * 1e9),
        )
        if not self.slots(needs):
            nodes = "; ".join(
                f"{r.get('CPU', 0):g} CPUs, {r.get('GPU', 0):g} GPUs, {r.get('memory', 0) / 1e9:.0f} GB"
                for r in resources
            )
            raise InputError(
                f"no node has what a step in {with_count(processes, 'process')} needs ({needs}). Nodes:"
                f" {nodes}. Change resources, threads or launch.num_processes in the recipe, or add a node.",
                code="no-node-fits",
                setting="resources" if processes == 1 else "launch.num_processes",
            )
        return needs

    @property
    def node_bytes(self) -> int:
        """The memory of the largest node with CPUs that tasks can reserve, bytes."""
        return self._room(TaskNeeds(1, 0, None))

    def _room(self, needs: TaskNeeds) -> int:
        """Return the memory of the largest node that has these needs, bytes."""
        resources = [node["Resources"] for node in self.nodes()]
        return int(
            max(
                (
                    node_resources.get("memory", 0)
                    for node_resources in resources
                    if needs.count_on(node_resources)
                ),
                default=0,
            )
        )

    def with_memory(self, needs: TaskNeeds, memory_bytes: int) -> TaskNeeds:
        """Return the needs with this memory, at most that of the largest node.

        An estimate does not keep work from starting.
        """
        return replace(needs, memory_bytes=min(memory_bytes, self._room(needs)) or None)

    def slots(self, needs: TaskNeeds) -> int:
        """Return how many tasks the living nodes can run at once."""
        return sum(needs.count_on(node["Resources"]) for node in self.nodes())

    def latency_options(self) -> dict[str, Any] | None:
        """Return the options of a task that measures latency: an idle marked node; None if none is marked."""
        latency_nodes = [n["Resources"] for n in self.nodes() if n["Resources"].get(LATENCY_RESOURCE)]
        if not latency_nodes:
            return None
        return {"num_cpus": max(r.get("CPU", 0) for r in latency_nodes), "resources": {LATENCY_RESOURCE: 1}}

    def check_nodes(self, store: Store, paths: Sequence[Path]) -> None:
        """Require that every node has the same versions, the store and `paths`.

        Raises:
            InputError: some have not; the message lists every problem: `cluster-versions-differ`,
                `missing-on-node`, `store-not-shared`, `node-unusable`, or an error of its remote store.
        """
        url = None if store.remote is None else store.remote.url
        if url is not None and url.startswith("memory:"):
            raise InputError(
                f"the store {url} is in the memory of one process, which nodes do not share. Use a shared"
                " folder or a bucket: --store s3://...",
                code="store-not-shared",
            )
        key = json_hash(
            [str(store.root), url, sorted(map(str, paths)), sorted(n["NodeID"] for n in self.nodes())]
        )
        with self._lock:
            if key in self._checked:
                return
            token = None if url is not None else store.root / "locks" / f".node-check-{os.getpid()}.part"
            try:
                if token is not None:
                    token.touch()
                answers = self._ask_nodes(NodeRequest(store.root, url, token, tuple(paths)))
            finally:
                if token is not None:
                    token.unlink(missing_ok=True)
            problems = [
                problem for name, answer in answers.items() for problem in _node_problems(name, answer)
            ]
            if problems:
                raise combined_error(problems)
            self._checked.add(key)

    def _ask_nodes(self, request: NodeRequest) -> dict[str, dict[str, Any] | Exception]:
        """Return each node's answer to `request`, or why there is none, by the node's name."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote_inspect = _remote_function(inspect_node)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self.nodes()}
        running = {
            node: remote_inspect.options(
                num_cpus=0, max_retries=0, name="smelt check",
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            ).remote(request)
            for node in addresses
        }  # fmt: skip
        deadline, answers = time.monotonic() + _CHECK_S, dict[str, Any]()
        for node, answer in running.items():
            name = f"node {addresses[node]} ({node[:6]})"
            try:
                answers[name] = ray.get(answer, timeout=max(1.0, deadline - time.monotonic()))
            except Exception as error:  # the process did not start, smelt is missing there, ...
                if not self._has_left(node):
                    answers[name] = error
        return answers

    def _has_left(self, node: str) -> bool:
        """Return whether a node has died, which Ray lists as alive for some seconds."""
        deadline = time.monotonic() + _LEAVING_S
        while any(listed_node["NodeID"] == node for listed_node in self.nodes()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True


@cache
def _remote_function(work: Callable[..., Any]) -> Any:
    import ray

    return ray.remote(work)


@cache
def open_cluster(executor: str) -> RayCluster:
    """Return the cluster that `--executor` names, connected.

    Raises:
        MissingDependencyError: Ray is not installed, or too old (`not-installed`).
        InputError: `unknown-executor`, `executor-unreachable`.
    """
    match = _EXECUTOR.fullmatch(executor)
    if match is None:
        raise InputError(
            f"{executor}: unknown executor. Expected ray, or ray://HOST:PORT with the address of"
            " `ray start --head`, such as ray://10.0.0.1:6379.",
            code="unknown-executor",
        )
    if (problem := package_problem("ray", OLDEST_RAY)) is not None:
        raise MissingDependencyError(
            f"--executor {executor}: {problem} ({install_command('ray', OLDEST_RAY)}).", code="not-installed"
        )
    return RayCluster(match["address"])


def inspect_node(request: NodeRequest) -> dict[str, Any]:
    """Return what this node has: `versions`, `missing` paths, `store`, code and text of its error or None."""
    store_error: tuple[str, str] | None = None
    try:
        if request.token is None:
            open_node_store(request.store_root, request.store_url)
        elif not request.token.exists():
            raise InputError(
                f"the store {request.store_root} is not the driver's. Use a shared folder, mounted at the"
                " same path, or a bucket: --store s3://...",
                code="store-not-shared",
            )
    except InputError as error:
        store_error = error.code, str(error)
    return {
        "versions": _versions(),
        "missing": [str(path) for path in request.paths if not path.exists()],
        "store": store_error,
    }


def open_node_store(
    root: Path, url: str | None, warn: Callable[[Message], None] = lambda message: None
) -> Store:
    """Return the store of the driver on this node.

    Args:
        root: the driver's folder.
        url: of its remote store, whose local folder may be another one here.
        warn: as of `Store`.

    Raises:
        InputError: it cannot be used.
    """
    if url is None:
        return Store(root, warn=warn)
    remote = open_remote_store(url)
    if STORE_VARIABLE in os.environ:
        return Store(Path(os.environ[STORE_VARIABLE]), remote, warn)
    try:
        return Store(root, remote, warn)
    except InputError:  # a path of another machine
        return Store(Path.home() / ".cache" / "smelt" / "store", remote, warn)


@cache
def _versions() -> dict[str, str]:
    """Return the versions that steps depend on, without the build of a package such as +cpu."""
    import importlib

    versions = {
        name.removesuffix("-gpu"): number.partition("+")[0]
        for name, number in package_versions(("smelt", *KEY_LIBRARIES)).items()
    }
    files = []
    for name in _SOURCES:  # checkouts of different commits have one version
        package_folder = Path(str(importlib.import_module(name).__file__)).parent
        files += [
            [f"{name}/{p.relative_to(package_folder).as_posix()}", sha256_of(p)]
            for p in sorted(package_folder.rglob("*.py"))
        ]
    return versions | {"smelt's source": json_hash(files)[:12]}


def _node_problems(name: str, answer: dict[str, Any] | Exception) -> list[Message]:
    if isinstance(answer, Exception):
        text = (str(answer).strip() or type(answer).__name__).splitlines()[-1][:300]
        return [
            error_message(
                "node-unusable",
                f"{name}: no process of smelt could be started: {text} Install smelt there, or remove the"
                " node.",
            )
        ]
    local_versions, node_versions = _versions(), answer["versions"]
    mismatches = [
        f"{package} {node_versions.get(package, 'missing')} (here {number})"
        for package, number in local_versions.items()
        if node_versions.get(package) != number
        and (package in node_versions or package in ("smelt", "torch"))
    ]
    problems = []
    if mismatches:
        problems.append(
            error_message(
                "cluster-versions-differ",
                f"{name}: other versions than on this machine: {', '.join(mismatches)}. Install the same.",
            )
        )
    if answer["missing"]:
        problems.append(
            error_message(
                "missing-on-node",
                f"{name}: no {', '.join(answer['missing'])}. Copy or mount it at the same path.",
            )
        )
    if answer["store"] is not None:
        code, text = answer["store"]
        problems.append(error_message(code, f"{name}: {text}"))
    return problems


def _require_answer(address: str) -> None:
    """Require that something listens at HOST:PORT; Ray would try for a minute.

    Raises:
        InputError: `executor-unreachable`.
    """
    if (problem := connection_problem(address)) is not None:
        raise InputError(
            f"ray://{address}: {problem}. Expected the address of `ray start --head`, by default port 6379.",
            code="executor-unreachable",
        )


def connection_problem(address: str) -> str | None:
    """Return why nothing answers at HOST:PORT, or None."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError, ValueError) as error:
        return f"no answer ({getattr(error, 'strerror', None) or error})"
    return None
