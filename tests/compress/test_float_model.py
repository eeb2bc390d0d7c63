"""The model that a stage changes: refused where its weights are codes, counted as its file is."""

import json

import pytest
from safetensors import safe_open

from smelt.compress.model_input import load_float_model
from smelt.core.artifact import Artifact, Manifest
from smelt.core.errors import InputError
from smelt.models.checkpoint import count_stored_parameters
from tests.support.expected_errors import raises_code
from tests.support.models import tiny

pytestmark = pytest.mark.quick

FACTS = {"key": "0" * 64, "format": "torch", "task": "translation", "stage": "model", "settings": {}}
MANIFEST = Manifest(**FACTS, seed=0, parent=None, versions={})


def test_quantized_model_is_rejected(tmp_path):
    edit = {
        "op": "quantize",
        "module": "classifier",
        "scheme": "int8-dynamic",
        "granularity": "channel",
        "symmetric": True,
    }
    (tmp_path / "structure.json").write_text(json.dumps({"schema": 1, "edits": [edit]}))
    with raises_code("behind-quantize", InputError):
        load_float_model(Artifact(tmp_path, MANIFEST), "prune")


def test_counted_parameters_equal_stored_parameters(tmp_path):
    folder = tiny.write_marian(tmp_path / "m")
    model, edits = load_float_model(Artifact(folder, MANIFEST), "prune")
    with safe_open(folder / "model.safetensors", "pt") as file:
        value_counts = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    assert (count_stored_parameters(model), edits) == (sum(value_counts.values()), [])
    assert count_stored_parameters(model) < sum(p.numel() for p in model.parameters()), (
        "fixed positions are computed, not stored"
    )
