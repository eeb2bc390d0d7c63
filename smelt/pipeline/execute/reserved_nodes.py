"""Work of a step in several processes on a Ray cluster: a training, and the shards of a scoring.

The step reserves what each process needs at once, in a placement group of Ray: steps that wait for each
other's nodes would wait forever. The step itself, and process 0 of a training, run in the first bundle, next
to the step's folders; the others are tasks in the other bundles. If a node dies, the step is done again with
other nodes, and a training resumes from its checkpoint.

Ray Train is not used: it chooses itself which node has process 0, and nodes share no more than the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.core.errors import RunError
from smelt.core.files import read_json_object
from smelt.core.process_group import ShardEnd, in_shard, merge_parts
from smelt.core.store import Store
from smelt.core.system import child_environment
from smelt.core.workspaces import temporary_workspace
from smelt.pipeline.execute.ray_cluster import TaskNeeds, open_node_store
from smelt.pipeline.execute.training_processes import free_port, rank_process, run_rank, write_failures
from smelt.pipeline.execute.training_worker import JOB_FILE

RETRIES = 3  # of work whose node or process died
LOST = "task-lost"
_SETTLE_SECONDS = 60.0  # until the other processes have ended, and Ray has noticed a dead node
_POLL_SECONDS = 1.0


def crash_errors() -> tuple[type[Exception], ...]:
    """Return Ray's errors of a task whose node or process died."""
    from ray import exceptions

    return (
        exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError,
        exceptions.ObjectLostError, exceptions.TaskUnschedulableError,
    )  # fmt: skip


def lost_error(error: Exception) -> RunError:
    """Return the error of a task that Ray gives up."""
    text = " ".join(str(error).split())[:300]
    return RunError(
        f"the process or the node of this task died {RETRIES + 1} times: {text} If it was out of memory, set"
        " resources: {memory_gb: ...} in the recipe.",
        code=LOST,
    )


@dataclass(frozen=True)
class ReservedNodes:
    """What is reserved for a step, on one or several nodes, used by the task in the first bundle.

    group: placement group with a bundle for each process. needs: of each. references: of the run's job and
    data.
    """

    group: Any
    count: int
    needs: TaskNeeds
    references: Sequence[Any]

    def options(self, bundle: int) -> dict[str, Any]:
        """Return the options of a task in a bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return self.needs.options() | {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, bundle)
        }

    @contextlib.contextmanager
    def start_ranks(self, space: Path, count: int, threads: int | None) -> Iterator[Callable[[], bool]]:
        """Start the processes of the job in `space`; yield a function that returns whether they have ended.

        Raises:
            RunError: a node died (`task-lost`).
        """
        import ray

        job = read_json_object(space / JOB_FILE)
        nodes = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        on_node = [list(nodes.values()).count(nodes[rank]) for rank in range(count)]
        shared = {
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": "0",  # Ray shows each process its own GPUs
            "MASTER_ADDR": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": str(threads or max(1, int(self.needs.cpus))),
        }
        environments = [
            {**shared, "RANK": str(rank), "LOCAL_WORLD_SIZE": str(n)} for rank, n in enumerate(on_node)
        ]
        work = ray.remote(_run_rank_task)
        tasks = {
            rank: work.options(
                **self.options(rank), max_retries=0, name=f"smelt {job['step']}, process {rank}"
            ).remote(self.references[0], job, rank, environments[rank])
            for rank in range(1, count)
        }
        try:
            with rank_process(space, 0, child_environment(**environments[0])) as process:
                yield lambda: process.poll() is not None or bool(_failures(tasks))
                code = process.poll()
                ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=_SETTLE_SECONDS)
                if found := _failures(tasks):
                    write_failures(space, code, found)
        finally:
            for task in tasks.values():
                ray.cancel(task, force=True)

    def score(self, score: Callable[[], dict[str, Any]], shard: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `score`, whose batches are computed by tasks in all bundles.

        Args:
            score: computes a score, or the share of a shard (`in_shard`).
            shard: called in a task with `references`, `arguments` and those of `in_shard`; returns the parts
                of the shard, and its error or None. If its node dies, it runs again.
            arguments: of `shard`.

        Raises:
            SmeltError: of a shard.
        """
        import ray

        known: list[list[Any]] = []
        work = ray.remote(shard)
        while True:
            with contextlib.suppress(ShardEnd), in_shard(-1, self.count, known):
                return score()
            others = [
                work.options(
                    **self.options(n), max_retries=RETRIES, name=f"smelt {arguments[0]}, shard {n}"
                ).remote(*self.references, *arguments, n, self.count, known)
                for n in range(1, self.count)
            ]
            parts: list[list[Any]] = []
            try:
                with in_shard(0, self.count, known):
                    score()
            except ShardEnd as end:
                parts.append(end.parts)
            try:
                found = ray.get(others)
            except crash_errors() as error:
                raise lost_error(error) from error
            for part, failure in found:
                if failure is not None:
                    raise failure
                parts.append(part)
            known += merge_parts(parts)


def _failures(tasks: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
    """Return how processes failed that have ended, by their number.

    Raises:
        RunError: a node died.
    """
    import ray

    ended = set(ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=0)[0])
    try:
        found = {rank: ray.get(task) for rank, task in tasks.items() if task in ended}
    except crash_errors() as error:
        raise lost_error(error) from error
    return {rank: failure for rank, failure in found.items() if failure is not None}


def _run_rank_task(
    run: Any, job: Mapping[str, Any], rank: int, environment: Mapping[str, str]
) -> dict[str, Any] | None:
    """Run process `rank` of a job of a run on this node; return how it failed, or None."""
    store = open_node_store(run.store_root, run.store_url)
    own = dict(job) | {
        "store": str(store.root),
        "ancestors": {name: _path_here(store, path) for name, path in job["ancestors"].items()},
    }
    with temporary_workspace() as folder:
        return run_rank(folder, own, rank, child_environment(**environment))


def _path_here(store: Store, path: str) -> str:
    """Return the folder of an artifact of another node's store in this one."""
    found = store.find(Path(path).name)
    return path if found is None else str(found.path)


@contextlib.contextmanager
def reserve_nodes(
    name: str, count: int, needs: TaskNeeds, references: Sequence[Any]
) -> Iterator[ReservedNodes]:
    """Reserve the needs of `count` processes inside the context, under a name; wait until they are free."""
    from ray.util import placement_group, remove_placement_group

    options = {"CPU": needs.cpus, "GPU": needs.gpus, "memory": float(needs.memory_bytes or 0)}
    bundle = {resource: value for resource, value in options.items() if value}
    group = placement_group([bundle] * count, strategy="PACK", name=name)
    try:
        while not group.wait(_POLL_SECONDS):
            pass
        yield ReservedNodes(group, count, needs, references)
    finally:
        remove_placement_group(group)


def release_nodes(names: Sequence[str]) -> None:
    """Release what is reserved under `names`, by tasks that were cancelled."""
    from ray.util import get_placement_group, remove_placement_group

    for name in names:
        with contextlib.suppress(ValueError):  # it is released already
            remove_placement_group(get_placement_group(name))
