"""The operations of the steps of a run, for an input of the data's mean size; counts are stored."""

from __future__ import annotations

from smelt.core.artifact import Artifact
from smelt.core.files import json_hash
from smelt.core.process_group import process_rank
from smelt.core.store import Store
from smelt.core.system import package_versions
from smelt.data.splits import Split
from smelt.data.tasks import Task

_COUNT_VERSION = 1


def step_operations(artifact: Artifact, split: Split, task: Task, store: Store) -> int:
    """Return the multiply-adds of a torch artifact for one input of the mean size of `split`.

    Raises:
        InputError: its files do not define a model and a tokenizer.
    """
    key = json_hash(
        {
            "kind": "operations",
            "version": _COUNT_VERSION,
            "artifact": artifact.key,
            "data": split.fingerprint,
            "libraries": package_versions(("torch", "transformers", "tokenizers")),
        }
    )
    stored = store.read_score(key)
    if stored is not None:
        return int(stored["operations"])
    from smelt.models.operations import count_model_operations
    from smelt.tasks.input_size import mean_input_size

    size = mean_input_size(artifact.path, split, task)
    operations = count_model_operations(artifact.path, size)
    if process_rank() == 0:
        store.write_score(key, {"artifact": artifact.key, "operations": operations, "size": size})
    return operations
