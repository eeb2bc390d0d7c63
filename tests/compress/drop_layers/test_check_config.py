"""How many layers stay, and what is said of what cannot be, before any model is read."""

import pytest
from pydantic import ValidationError

from smelt.compress.drop_layers.settings import DropLayersSettings, check_layer_counts, kept_layers

pytestmark = pytest.mark.quick

MARIAN = {"model_type": "marian", "encoder_layers": 6, "decoder_layers": 3}
BERT = {"model_type": "bert", "num_hidden_layers": 12}
T5 = {"model_type": "t5", "num_layers": 4}
MODERN = {"model_type": "modernbert", "num_hidden_layers": 4}


@pytest.mark.parametrize(("settings", "expected_layers"), [
    ({}, {"encoder_layers": 3, "decoder_layers": 2}),  # half, and a half of three counts up
    ({"keep_ratio": 0.1}, {"encoder_layers": 1, "decoder_layers": 1}),
    ({"decoder_layers": 1}, {"encoder_layers": 6, "decoder_layers": 1}),
    ({"keep_ratio": 0.5, "decoder_layers": [0, 2]}, {"encoder_layers": 3, "decoder_layers": [0, 2]}),
])  # fmt: skip
def test_unnamed_stack_keeps_ratio_or_all_layers(settings, expected_layers):
    assert (
        kept_layers(DropLayersSettings(**settings), {"encoder_layers": 6, "decoder_layers": 3})
        == expected_layers
    )


def test_resulting_config_has_remaining_layer_counts():
    errors, after = check_layer_counts(DropLayersSettings(keep_ratio=0.5), MARIAN)
    assert not errors
    assert after == {**MARIAN, "encoder_layers": 3, "decoder_layers": 2}
    _, after = check_layer_counts(DropLayersSettings(decoder_layers=[1]), T5)
    assert after == {**T5, "num_decoder_layers": 1, "num_layers": 4}


@pytest.mark.parametrize(("settings", "config", "setting", "code"), [
    ({"layers": 13}, BERT, "layers", "more-than-model-has"),
    ({"layers": [0, 12]}, BERT, "layers", "wrong-layer-numbers"),
    ({"layers": [3, 1]}, BERT, "layers", "wrong-layer-numbers"),
    ({"decoder_layers": 1}, BERT, "decoder_layers", "unknown-stack"),
    ({"layers": [1, 2]}, MODERN, "layers", "first-layer-required"),
])  # fmt: skip
def test_unknown_layers_are_rejected(settings, config, setting, code):
    (error,) = check_layer_counts(DropLayersSettings(**settings), config)[0]
    assert (error.setting, error.code) == (setting, code)


@pytest.mark.parametrize(("settings", "setting", "code"), [
    ({"targets": ["ffn"], "decoder_layers": 4}, "decoder_layers", "more-than-model-has"),
    ({"targets": ["attention", "cross-attention", "ffn"], "decoder_layers": 10}, "decoder_layers",
     "more-than-model-has"),
    ({"targets": ["attention", "ffn"], "encoder_layers": 1}, "encoder_layers", "too-few-kept"),
    ({"targets": ["cross-attention"], "encoder_layers": 2}, "encoder_layers", "unknown-part"),
])  # fmt: skip
def test_unknown_parts_are_rejected(settings, setting, code):
    (error,) = check_layer_counts(DropLayersSettings(**settings), MARIAN)[0]
    assert (error.setting, error.code) == (setting, code)


def test_keeping_all_parts_is_allowed():
    settings = {"targets": ["attention", "cross-attention", "ffn"], "encoder_layers": 12, "decoder_layers": 9}
    assert check_layer_counts(DropLayersSettings(**settings), MARIAN)[0] == []


def test_last_layers_conflict_with_required_first_layer_is_reported_for_importance():
    (error,) = check_layer_counts(DropLayersSettings(keep_ratio=0.5, importance="last"), MODERN)[0]
    assert (error.setting, error.code) == ("importance", "first-layer-required")
    assert not check_layer_counts(DropLayersSettings(keep_ratio=1, importance="last"), MODERN)[0]


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"layers": []}, {"keep_ratio": 0}, {"keep_ratio": 1.5}])
def test_keeping_no_layer_is_rejected(wrong):
    with pytest.raises(ValidationError):
        DropLayersSettings(**wrong)


def test_calibration_data_is_needed_only_by_data_driven_importances():
    from smelt.compress.drop_layers.stage import DropLayers

    assert DropLayers.needs_with(DropLayersSettings(), ()) == {"train"}
    assert DropLayers.needs_with(DropLayersSettings(importance="loss"), ("calibration",)) == {"calibration"}
    assert DropLayers.needs_with(DropLayersSettings(importance="uniform"), ()) == frozenset()
