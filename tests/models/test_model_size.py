"""Sizes from config and headers are those of the model that transformers builds."""

from __future__ import annotations

import json

import every_family
import pytest
from torch import nn

from smelt.models.count_parameters import count_parameters
from smelt.models.empty_model import empty_model
from smelt.models.families.model_blocks import blocks_of
from smelt.models.model_size import read_model_size, size_from_config


@pytest.mark.parametrize(
    "family", ["marian", "t5", "bert", "modernbert", "gpt2", "opt", "qwen3", "phi3", "vit"]
)
def test_weights_of_blocks_and_of_the_whole_model(family):
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


def test_a_model_without_blocks_has_the_weights_of_its_files(tmp_path):
    folder = every_family.model_with_layers("resnet", 2)
    size = read_model_size(folder, json.loads((folder / "config.json").read_text()))
    assert (size.stacks, size.parameters) == ((), pytest.approx(count_parameters(folder), rel=0.05))
