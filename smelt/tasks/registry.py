"""Access to the tasks by name; the file of a task is imported at its first use."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from smelt.data.tasks import ALL_TASKS, task_traits
from smelt.tasks.spec import TaskSpec


@cache
def task_spec(task: str) -> TaskSpec:
    """Return the specification of `task`, in smelt/tasks/NAME.py with `_` for `-`.

    Raises:
        InputError: as `task_traits`.
    """
    task_traits(task)
    spec: TaskSpec = import_module(f"smelt.tasks.{task.replace('-', '_')}").TASK
    return spec


def all_specs() -> tuple[TaskSpec, ...]:
    """Return the specifications of all tasks."""
    return tuple(map(task_spec, ALL_TASKS))
