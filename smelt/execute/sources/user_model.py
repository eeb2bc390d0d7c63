"""Import the user's model as the first artifact of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smelt.core.artifact import Artifact, Manifest
from smelt.core.files import json_hash, sha256_of
from smelt.execute.step_runner import StepRunner
from smelt.execute.task_setup import TaskSetup
from smelt.inspect.model_folder import read_config
from smelt.inspect.quantized_model import inspect_quantization
from smelt.recipe.problem_type import has_classifier
from smelt.recipe.stages import MODEL_STEP


def import_user_model(
    step_runner: StepRunner, source: Path, task_setup: TaskSetup, rebuild: bool
) -> tuple[Artifact, bool]:
    """Import the original model into the store; return the artifact, and whether it was there already.

    Raises:
        InputError: its quantized weights are not supported, or its weights are NaN or infinite.
    """
    from smelt.runtime.models.import_model import import_model, source_files
    from smelt.runtime.models.weights.finite_weights import require_finite_weights
    from smelt.runtime.text.write_text_rules import write_text_rules

    labels, rules, config = task_setup.labels, task_setup.text_rules, read_config(source)[0]
    coded = inspect_quantization(source, config) is not None
    key = json_hash(
        {
            "stage": "model",
            "version": 4 if coded else 3,  # 4 records the bits of quantized weights
            "files": {p.name: sha256_of(p) for p in source_files(source)},
            "task": step_runner.task,
            "labels": labels and labels[1],
            "problem_type": labels and labels[0],
            **task_setup.key_parts,
            "seed": step_runner.seed,
            **step_runner.windows_details,
        }
    )

    def make(space: Path) -> Artifact:
        out = space / "out"
        out.mkdir()
        problem, names = labels or (None, None)
        notes = import_model(source, out, names, step_runner.seed, problem, task_setup.sentences)
        new_head = bool(labels) and not has_classifier(config)
        require_finite_weights(source, new_head, bool(task_setup.sentences))
        write_text_rules(out, rules)
        details = {
            **_model_details(source, out, coded),
            **rules.model_dump(exclude_defaults=True),
            **step_runner.windows_details,
        }
        if new_head:
            details["new_head"] = True  # random, so the model cannot be a teacher
        manifest = Manifest(
            key=key,
            format="torch",
            task=step_runner.task,
            stage="model",
            settings={},
            seed=step_runner.seed,
            parent=None,
            versions=dict(step_runner.versions),
            warnings=notes,
            details=details,
        )
        return step_runner.store.commit(out, manifest, replace=rebuild)

    return step_runner.get_or_make(MODEL_STEP, key, rebuild, make)


def _model_details(source: Path, out: Path, quantized: bool) -> dict[str, Any]:
    """Return details of the model in `source`, copied to `out`: parameters, bits per weight, licence."""
    from smelt.compress.quantize.weight_quantizer import quantized_weight_bits
    from smelt.runtime.models.create.empty_model import empty_model
    from smelt.runtime.models.licence import read_licence
    from smelt.runtime.models.stored_dtype import stored_dtypes
    from smelt.runtime.models.weights.count_parameters import count_parameters

    details: dict[str, Any] = {"parameters": count_parameters(out)}
    if quantized:
        details["bits_per_weight"] = quantized_weight_bits(
            empty_model(out)[0], stored_dtypes(out).default.itemsize
        )
    if (licence := read_licence(source)) is not None:
        details["licence"] = licence  # for `smelt package`
    return details
