"""Which states go with which, and what is said of those that do not exist."""

import pytest

from smelt.compress.distill.layer_map import check_map, of_stack, resolve

BERT = {"model_type": "bert", "num_hidden_layers": 3}
MARIAN = {"model_type": "marian", "encoder_layers": 4, "decoder_layers": 2}


@pytest.mark.parametrize(
    ("said", "student", "teacher", "expected"),
    [
        ("uniform", 4, 12, {0: 0, 1: 3, 2: 6, 3: 9, 4: 12}),  # TinyBERT's
        ("uniform", 3, 4, {0: 0, 1: 1, 2: 3, 3: 4}),
        ("last", 4, 12, {4: 12}),
        ({3: 7, 0: 3}, 4, 12, {0: 3, 3: 7}),
    ],
)
def test_states_go_with_states(said, student, teacher, expected):
    assert resolve(said, student, teacher) == expected


def test_each_stack_may_have_its_own():
    layer_map = {"decoder_layers": {2: 1}, "encoder_layers": "last"}
    assert of_stack(layer_map, "decoder_layers") == {2: 1}
    assert of_stack(layer_map, "encoder_layers") == "last"
    assert of_stack({"encoder_layers": "last"}, "decoder_layers") == "uniform"
    assert of_stack({1: 2}, "decoder_layers") == {1: 2}


@pytest.mark.parametrize(
    ("layer_map", "config", "setting", "message"),
    [
        (
            {4: 1},
            BERT,
            "layer_map",
            "0 (its embeddings) to 3 (its last layer), and the map says 4.",
        ),
        ({1: 9}, BERT, "layer_map", "the teacher has the states 0 (its embeddings) to 6"),
        ({"decoder_layers": "last"}, BERT, "layer_map.decoder_layers", "a bert model has layers."),
        ({3: 1}, MARIAN, "layer_map", "decoder_layers: the student has the states 0 (its embeddings) to 2"),
    ],
)
def test_states_that_do_not_exist_are_named(layer_map, config, setting, message):
    teacher = config | {"num_hidden_layers": 6}
    (found,) = check_map(layer_map, config, teacher)
    assert found[0] == setting
    assert message in found[1]
    assert check_map("uniform", config, teacher) == []
