"""Which exports caches of a fixed length and fused operators are refused for, before any work."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from smelt.core.errors import InputError
from smelt.data.splits import Example, Split, Windows
from smelt.export.onnx_stage import Onnx, require_room_for_windows, required_opset
from smelt.export.settings import OnnxSettings
from smelt.pipeline.plan.load_plan import load_plan
from tests.support.expected_errors import message_locations, raises_code
from tests.support.models import causal, masked

pytestmark = pytest.mark.quick
FIXED = OnnxSettings(target="ort-cuda", cache_length=32)


@pytest.mark.parametrize(
    "settings",
    [
        {"target": "ort-cpu", "cache_length": 32},
        {"target": "openvino", "cache_length": 32},
        {"target": "ort-tensorrt", "cache_length": 32},
        {"target": "ort-tensorrt", "opset": 23},
        {"target": "ort-cuda", "cache_length": 8},
        {"target": "ort-cuda", "opset": 25},
    ],
)
def test_unsupported_settings_are_refused(settings):
    with pytest.raises(ValidationError):
        OnnxSettings(**settings)


@pytest.mark.parametrize("task", ["translation", "text-classification", "image-classification"])
def test_models_without_caches_of_a_language_model_are_refused(task):
    [problem] = Onnx.check_rows(FIXED, task, {})
    assert (problem.code, problem.setting) == ("unsupported-task", "cache_length")
    assert Onnx.check_rows(FIXED, "language-modeling", {}) == []


def test_longer_caches_than_positions_are_refused():
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 31}
    [problem], _ = Onnx.check_model(FIXED, config)
    assert (problem.code, problem.setting) == ("does-not-fit-model", "cache_length")
    assert Onnx.check_model(FIXED, {**config, "max_position_embeddings": 32})[0] == []


def test_windows_beyond_the_caches_are_refused(tmp_path):
    """Their perplexity could not be compared with the baseline's."""
    rows = (Example("a text"),)
    longer = {"test": Split("made", rows, windows=Windows(length=33))}
    equal = {"test": Split("made", rows, windows=Windows(length=32))}
    [problem] = Onnx.check_rows(FIXED, "language-modeling", longer)
    assert (problem.code, problem.setting) == ("window-too-long", "cache_length")
    assert Onnx.check_rows(FIXED, "language-modeling", equal) == []
    folder = causal.write_model(tmp_path / "m", "llama")  # of 64 positions, the default of windows
    default = {"test": Split("made", rows, windows=Windows())}
    assert Onnx.check_rows(FIXED, "language-modeling", default) == []
    with pytest.raises(InputError) as caught:
        require_room_for_windows(FIXED, folder, default)
    assert caught.value.code == "window-too-long"
    require_room_for_windows(FIXED.model_copy(update={"cache_length": 64}), folder, default)


def test_cache_length_raises_opset_unless_opset_is_for_older_runtimes():
    model = SimpleNamespace(modules=list)
    assert required_opset(FIXED, model) == 24
    assert required_opset(OnnxSettings(target="tensorrt", cache_length=32), model) == 24
    assert required_opset(OnnxSettings(target="tensorrt"), model) == 20
    with pytest.raises(InputError) as caught:
        required_opset(OnnxSettings(target="tensorrt", cache_length=32, opset=17), model)
    assert caught.value.code == "opset-too-low"


def test_windows_beyond_a_fixed_input_are_refused(tmp_path):
    rows, settings = (Example("a text"),), OnnxSettings(batch_size=1, sequence_length=16)
    longer = {"test": Split("made", rows, windows=Windows(length=17))}
    equal = {"test": Split("made", rows, windows=Windows(length=16))}
    [problem] = Onnx.check_rows(settings, "masked-language-modeling", longer)
    assert (problem.code, problem.setting) == ("window-too-long", "sequence_length")
    assert Onnx.check_rows(settings, "masked-language-modeling", equal) == []
    folder = masked.write_model(tmp_path / "m")  # of more positions
    with raises_code("window-too-long", InputError):
        require_room_for_windows(settings, folder, {"test": Split("made", rows, windows=Windows())})
    require_room_for_windows(settings, folder, equal)
    masked.write_lines(tmp_path / "lines.txt", 20)
    recipe = tmp_path / "recipe.yaml"
    text = "model: m\ntask: masked-language-modeling\ndata: {test: lines.txt%s}\nstages:\n"
    text += "  - onnx: {batch_size: 1, sequence_length: 16}\n"
    recipe.write_text(text % "")
    with raises_code("window-too-long", InputError) as caught:
        load_plan(recipe)
    assert message_locations(caught.value.messages) == [
        ("window-too-long", "stages[0].onnx.sequence_length", 5)
    ]
    recipe.write_text(text % ", windows: {length: 16}")
    assert load_plan(recipe).steps
