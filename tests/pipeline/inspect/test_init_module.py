"""`smelt init --module`: recipes that plan and name the module's inputs, and options that do not fit."""

import pytest
from ruamel.yaml import YAML

import smelt
from smelt.core.errors import InputError
from smelt.pipeline.inspect.init_recipe import init_recipe
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.expected_errors import command_error, raises_code
from tests.support.models import array_modules, text_modules, user_modules


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def init(function, *options, code=0):
    return harness.smelt(
        "init", "--module", f"nets:{function}", "--weights", f"{function}.safetensors", *options, code=code
    )


def written(name):
    load_plan(f"{name}.yaml")
    with open(f"{name}.yaml", encoding="utf-8") as file:
        recipe = YAML(typ="safe").load(file)
    schemes = [stage["quantize"]["scheme"] for stage in recipe["stages"] if "quantize" in stage]
    return recipe, schemes


def test_classifier_of_images_has_labels_of_the_data(tmp_path):
    user_modules.write_module(tmp_path, "cnn")
    init("cnn", "--image-size", 16, "--data", "train.jsonl", "--data", "test.jsonl")
    recipe, schemes = written("cnn")
    assert recipe["task"] == "image-classification"
    assert recipe["model"] == {
        "module": "nets:cnn", "weights": "cnn.safetensors", "image_size": 16, "labels": ["dark", "light"],
    }  # fmt: skip
    assert schemes == ["int8-static"]


def test_classifier_of_texts_has_its_tokenizer(tmp_path):
    text_modules.write_module(tmp_path)
    init("text_cnn", "--tokenizer", "tokenizer", "--data", ".", "--out", "own.yaml")
    recipe, schemes = written("own")
    assert recipe["model"]["tokenizer"] == "tokenizer"
    assert recipe["model"]["labels"] == ["negative", "positive"]
    assert schemes == ["int8-dynamic"]


def test_recipe_of_arrays_runs(tmp_path):
    array_modules.write_module(tmp_path, "two_heads")
    init("two_heads", "--data", "train.npz", "--data", "test.npz")
    recipe, schemes = written("two_heads")
    assert recipe["task"] == "custom"
    assert schemes == ["int8-static"]
    report = smelt.run("two_heads.yaml", out="run", overrides={"score.latency": False}).report
    assert {step["status"] for step in report["steps"]} == {"done"}


def test_module_without_layers_to_quantize_is_exported_only(tmp_path):
    """Without samples for calibration only linear layers are quantized, and it has none but the last."""
    user_modules.write_module(tmp_path, "cnn")
    init("cnn", "--image-size", 16, "--data", "test.jsonl", "--out", "cnn.yaml")
    recipe, schemes = written("cnn")
    assert schemes == []
    assert [stage["name"] for stage in recipe["stages"]] == ["onnx-fp32"]


def test_invalid_module_writes_no_recipe(tmp_path):
    array_modules.write_module(tmp_path, "failing")
    error = command_error(init("failing", "--data", "train.npz", "--data", "test.npz", code=2))
    assert error.code == "module-failed"
    assert not (tmp_path / "failing.yaml").exists()


@pytest.mark.parametrize("data", [("train.jsonl",), (".",), ("empty",)])
def test_data_without_arrays_needs_an_option(tmp_path, data):
    user_modules.write_module(tmp_path, "cnn")
    (tmp_path / "empty").mkdir()
    error = command_error(init("cnn", *(part for path in data for part in ("--data", path)), code=2))
    assert error.code == "missing-setting"


def test_folder_with_arrays_that_has_no_samples_of_its_own_is_missing_data(tmp_path):
    array_modules.write_module(tmp_path, "two_heads")
    (tmp_path / "other" / "sub").mkdir(parents=True)
    (tmp_path / "train.npz").rename(tmp_path / "other" / "sub" / "train.npz")
    error = command_error(init("two_heads", "--data", "other", code=2))
    assert error.code == "missing-data"


@pytest.mark.parametrize("options", [
    (), ("bert", "--module", "nets:cnn"), ("bert", "--weights", "x"), ("--module", "nets:cnn"),
    ("--module", "nets:cnn", "--weights", "x", "--fast"),
])  # fmt: skip
def test_options_that_do_not_fit_each_other_are_refused(options):
    assert harness.smelt("init", *options).exit_code == 2


def test_artifact_of_a_module_is_no_model_for_init(tmp_path):
    folder = user_modules.model_folder(tmp_path / "own", "cnn")
    with raises_code("user-module", InputError):
        init_recipe(str(folder), out="-")
