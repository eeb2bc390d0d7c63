"""Import a third-party ONNX model as the first artifact of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt.core.artifact import MANIFEST, Artifact, Manifest
from smelt.core.files import json_hash, read_json_object, sha256_of, write_json
from smelt.core.messages import Message, warning
from smelt.data.labels import SINGLE_LABEL
from smelt.data.splits import CUSTOM_TASK, Split

if TYPE_CHECKING:
    from smelt.pipeline.execute.step_runner import StepRunner, TaskSetup
    from smelt.pipeline.inspect.onnx_files import ThirdPartyModel
    from smelt.runtimes.third_party.signature import GraphSignature

# Increased whenever the same files would be imported differently.
_VERSION = 5
_GENERATION_CONFIG = "generation_config.json"


def import_onnx_model(
    step_runner: StepRunner,
    model: ThirdPartyModel,
    data: Mapping[str, Split],
    rebuild: bool,
    task_setup: TaskSetup | None = None,
) -> tuple[Artifact, bool]:
    """Import `model` into the store; return the artifact, and whether it was there already.

    task_setup: for text models, the task-specific settings.

    Raises:
        InputError: the graph fails on the first samples, or its files changed since they were checked.
    """
    graphs = list(model.graphs.values()) or [model.file]
    files = [*graphs, *(model.file.parent / name for name in model.weight_files)]
    key_fields: dict[str, Any] = {
        "stage": "model",
        "version": _VERSION,
        "graph": [sha256_of(path) for path in files],
        "task": step_runner.task,
    }
    axes = {value.name: value.axis for value in (*model.signature.inputs, *model.signature.outputs)}
    if step_runner.task == CUSTOM_TASK:
        key_fields["axes"] = axes
    if task_setup is not None:
        labels = task_setup.labels and task_setup.labels[0]
        key_fields |= {
            "texts": _tokenizer_hashes(model),
            "problem_type": labels,
            "seed": step_runner.seed,
            **task_setup.key_parts,
        }
    key = json_hash(key_fields)

    def make(space: Path) -> Artifact:
        from smelt.runtimes.third_party.import_graph import GRAPH_FILE, add_pooling

        out = space / "out"
        out.mkdir()
        details: dict[str, Any] = {"foreign": True, "target": "ort-cpu", **model.details}
        notes: list[Message] = []
        if model.graphs:
            _import_generation_graphs(model, out)
            details["parameters"] = _count_graph_parameters(out)
        else:
            notes += _import_graph(model, data["test"], out)
        if task_setup is not None and task_setup.sentences is not None:
            add_pooling(out / GRAPH_FILE, task_setup.sentences)
        notes += [] if task_setup is None else _import_tokenizer(model, task_setup, data, out, details)
        manifest = Manifest(
            key=key,
            format="onnx",
            task=step_runner.task,
            stage="model",
            settings={},
            seed=step_runner.seed,
            parent=None,
            versions=dict(step_runner.versions),
            details=details,
            warnings=notes,
        )
        return step_runner.store.commit(out, manifest, replace=rebuild)

    return step_runner.get_or_make("model", key, rebuild, make)


def _import_graph(model: ThirdPartyModel, rows: Split, out: Path) -> list[Message]:
    """Copy the graph into `out` and run it on the first samples; return warnings about its outputs."""
    from smelt.export.third_party.batch_independence import batch_dependence_warnings
    from smelt.runtimes.third_party.import_graph import import_graph
    from smelt.runtimes.third_party.signature import write_signature
    from smelt.runtimes.third_party.trial_run import trial_run

    graph = import_graph(model.file, out, outside=bool(model.weight_files))
    size = model.signature.fixed_batch_size or 1
    if rows.arrays is None:
        trial_run(graph, _ones_inputs(model.signature, size), str(model.file))
        return []
    write_signature(out, model.signature)
    trial_run(graph, model.signature.make_feeds(rows.arrays.padded_to(size), 0, size), str(model.file))
    return batch_dependence_warnings(graph, model.signature, rows.arrays, model.details)


def _import_generation_graphs(model: ThirdPartyModel, out: Path) -> None:
    """Write the graphs of a generative model and its generation config into `out`."""
    import shutil

    from smelt.runtimes.third_party.import_generator import import_generator

    assert model.tokenizer_folder is not None
    import_generator(model.graphs, read_json_object(model.tokenizer_folder / "config.json"), out)
    if (model.tokenizer_folder / _GENERATION_CONFIG).is_file():
        shutil.copyfile(model.tokenizer_folder / _GENERATION_CONFIG, out / _GENERATION_CONFIG)


def _count_graph_parameters(out: Path) -> int:
    """Return the number of parameters in the graphs in `out`; shared weights count in each graph."""
    import onnx

    from smelt.runtimes.third_party.graph_files import count_graph_parameters

    graphs = sorted(out.glob("*.onnx"))
    return sum(count_graph_parameters(onnx.load(str(path), load_external_data=False)) for path in graphs)


def _ones_inputs(signature: GraphSignature, rows: int) -> dict[str, Any]:
    """Return inputs of ones: token ids that every vocabulary has."""
    import numpy as np

    found = {}
    for value in signature.inputs:
        rest = [size if isinstance(size, int) else 8 for size in (value.shape or (rows, 8))[1:]]
        found[value.name] = np.ones([rows, *rest], value.dtype)
    return found


def _tokenizer_hashes(model: ThirdPartyModel) -> dict[str, str]:
    """Return the hashes of the files that affect tokenization."""
    assert model.tokenizer_folder is not None
    read = (".json", ".txt", ".model", ".spm")
    files = (
        path
        for path in sorted(model.tokenizer_folder.iterdir())
        if path.suffix in read and path.name != MANIFEST
    )
    return {path.name: sha256_of(path) for path in files}


def _import_tokenizer(
    model: ThirdPartyModel,
    task_setup: TaskSetup,
    data: Mapping[str, Split],
    out: Path,
    details: dict[str, Any],
) -> list[Message]:
    """Copy config and tokenizer into `out`, with the settings of the task; return warnings."""
    import shutil

    from smelt.export.tokenizer import export_tokenizer
    from smelt.models.checkpoint import copy_tokenizer, load_tokenizer
    from smelt.models.import_model import configure_embedder
    from smelt.models.write_text_rules import write_text_rules

    assert model.tokenizer_folder is not None
    shutil.copyfile(model.tokenizer_folder / "config.json", out / "config.json")
    copy_tokenizer(model.tokenizer_folder, out)
    problem = task_setup.labels[0] if task_setup.labels else None
    config = read_json_object(out / "config.json")
    if problem not in (None, SINGLE_LABEL) and config.get("problem_type") is None:
        write_json(out / "config.json", config | {"problem_type": problem})
    if task_setup.sentences is not None:
        configure_embedder(out, task_setup.sentences)
    write_text_rules(out, task_setup.text_rules)
    found = export_tokenizer(load_tokenizer(model.tokenizer_folder), model.tokenizer_folder, out, data)
    details["tokenizer"] = found.reader
    slow = f"Texts are tokenized by transformers, which takes seconds to import: {found.reason}"
    return [warning("slow-tokenizer", slow)] if found.reason else []
