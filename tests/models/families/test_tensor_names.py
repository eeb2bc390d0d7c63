"""Checkpoints of every family that transformers writes open with the same weights."""

import json
import shutil

import pytest
import torch
import transformers

from smelt.models.checkpoint import load_model
from smelt.models.import_model import import_model
from tests.support.models import every_family

# Experts have names of their own (tests/models/test_experts.py); T5's output layer here is tied in the config
# only, which transformers does not write.
FAMILIES = [family for family in every_family.MODELS if family not in ("mixtral", "t5")]


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_of_transformers_opens_with_its_weights(family, tmp_path):
    """`save_pretrained` writes the names of published checkpoints, which may be other than the model's."""
    folder = every_family.make_model(tmp_path / "m", family)
    expected = load_model(folder)[0].state_dict()
    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
    loaded = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)
    model = type(loaded)(loaded.config)  # one that is loaded is saved with the names that it had
    model.load_state_dict(loaded.state_dict())
    shutil.copytree(folder, tmp_path / "published", ignore=shutil.ignore_patterns("*.safetensors*"))
    model.save_pretrained(tmp_path / "published")
    (tmp_path / "out").mkdir()
    import_model(tmp_path / "published", tmp_path / "out")
    tensors = load_model(tmp_path / "out")[0].state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
