"""Sizes from config and headers are those of the model that transformers builds."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from smelt.models.checkpoint import count_stored_parameters, load_model
from smelt.models.empty_model import empty_model
from smelt.models.families.registry import blocks_of
from smelt.models.model_size import count_parameters, read_model_size, size_from_config
from tests.support.models import every_family


@pytest.mark.parametrize(
    "family",
    ["marian", "t5", "bert", "albert", "modernbert", "gpt2", "opt", "qwen3", "phi3", "vit", "dinov2"],
)
def test_model_size_equals_transformers_model(family):
    folder = every_family.model_with_layers(family, 3)
    config = json.loads((folder / "config.json").read_text())
    linear = [
        module.weight.numel()
        for block in blocks_of(empty_model(folder)[0])
        for module in block.module.modules()
        if isinstance(module, nn.Linear)
    ]
    size = read_model_size(folder, config)
    assert (size.block_weights, size.parameters) == (sum(linear), count_parameters(folder))
    assert size.stored_bytes == pytest.approx(4 * count_parameters(folder), rel=1e-6)
    halved = size_from_config(config).scaled_blocks(0.5)
    assert halved.block_weights == sum(linear) // 2
    for ratio in (0.9, 0.05):
        assert size.scaled_to(ratio).parameters == pytest.approx(ratio * size.parameters, abs=2)


@pytest.mark.parametrize("family", every_family.MODELS)
def test_loaded_model_has_as_many_parameters_as_its_files(family):
    """A step's details count the model, its row in the report the files."""
    folder = every_family.model_with_layers(family, 2)
    assert count_stored_parameters(load_model(folder)[0]) == count_parameters(folder)


def test_model_without_blocks_has_size_of_files(tmp_path):
    folder = every_family.model_with_layers("resnet", 2)
    size = read_model_size(folder, json.loads((folder / "config.json").read_text()))
    assert (size.stacks, size.parameters) == ((), pytest.approx(count_parameters(folder), rel=0.05))


def test_float_weights_not_in_config_are_counted(tmp_path):
    """Narrow embeddings (ELECTRA), and layers that an earlier run factorized."""
    transformers.ElectraForSequenceClassification(
        transformers.ElectraConfig(
            vocab_size=300, embedding_size=8, hidden_size=32, intermediate_size=64, num_hidden_layers=2
        )
    ).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = count_parameters(tmp_path)
    assert read_model_size(tmp_path, config).parameters == weights
    assert size_from_config(config).parameters < weights
    tensors = load_file(tmp_path / "model.safetensors")
    remaining = {name: t for name, t in tensors.items() if "layer.1.intermediate" not in name}
    save_file(remaining | {"low_rank": torch.zeros(1, 32)}, tmp_path / "model.safetensors")
    size = read_model_size(tmp_path, config)
    assert size.parameters == pytest.approx(sum(t.numel() for t in remaining.values()) + 32, abs=1)
    assert (size.bytes_per_weight, size.held_bytes) == (4.0, 4 * size.parameters)


def test_invalid_config_values_give_no_size():
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    assert size_from_config(config | {"vocab_size": "x"}).table_weights == 0
    assert size_from_config(config | {"num_hidden_layers": -1}) is None
