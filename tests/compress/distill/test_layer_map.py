"""Which states go with which, and what is said of those that do not exist."""

import re

import pytest

from smelt.compress.distill.layer_map import check_layer_map, resolve_layer_map, stack_map

pytestmark = pytest.mark.quick

BERT = {"model_type": "bert", "num_hidden_layers": 3}
MARIAN = {"model_type": "marian", "encoder_layers": 4, "decoder_layers": 2}


@pytest.mark.parametrize(("mapping", "student", "teacher", "expected"), [
    ("uniform", 4, 12, {0: 0, 1: 3, 2: 6, 3: 9, 4: 12}),  # TinyBERT's
    ("uniform", 3, 4, {0: 0, 1: 1, 2: 3, 3: 4}), ("last", 4, 12, {4: 12}),
    ({3: 7, 0: 3}, 4, 12, {0: 3, 3: 7}),
])  # fmt: skip
def test_layer_map_resolves_to_state_indices(mapping, student, teacher, expected):
    assert resolve_layer_map(mapping, student, teacher) == expected


def test_layer_map_can_differ_by_stack():
    layer_map = {"decoder_layers": {2: 1}, "encoder_layers": "last"}
    assert stack_map(layer_map, "decoder_layers") == {2: 1}
    assert stack_map(layer_map, "encoder_layers") == "last"
    assert stack_map({"encoder_layers": "last"}, "decoder_layers") == "uniform"
    assert stack_map({1: 2}, "decoder_layers") == {1: 2}


@pytest.mark.parametrize(("layer_map", "config", "setting", "code", "values"), [
    ({4: 1}, BERT, "layer_map", "unknown-layer", ["0", "3", "4"]),
    ({1: 9}, BERT, "layer_map", "unknown-layer", ["0", "6", "9"]),
    ({"decoder_layers": "last"}, BERT, "layer_map.decoder_layers", "unknown-stack", []),
    ({3: 1}, MARIAN, "layer_map", "unknown-layer", ["0", "2", "3"]),
])  # fmt: skip
def test_layer_map_with_unknown_layers_is_rejected(layer_map, config, setting, code, values):
    teacher = config | {"num_hidden_layers": 6}
    (error,) = check_layer_map(layer_map, config, teacher)
    assert (error.setting, error.code) == (setting, code)
    assert re.findall(r"\d+", error.message) == values
    assert check_layer_map("uniform", config, teacher) == []
