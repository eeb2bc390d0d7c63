"""A PyTorch module of arrays as the model of a recipe: its signature, and what the plan refuses."""

import json

import numpy as np
import pytest

from smelt.core.errors import InputError
from smelt.pipeline.plan.load_plan import load_plan
from smelt.runtimes.onnx_import.signature import read_signature
from tests.support.expected_errors import error_codes, raises_code
from tests.support.models import array_modules


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(folder, function, stages=("onnx",), data="", **model):
    return load_plan(array_modules.write_recipe(folder, function, stages, data, **model))


def described(values):
    return [(value.name, value.dtype, value.shape, value.axis) for value in values]


def test_signature_has_the_inputs_of_forward_and_the_outputs_of_a_run(tmp_path):
    folder = plan(array_modules.write_module(tmp_path, "two_heads"), "two_heads").local_model
    signature = read_signature(folder)
    assert described(signature.inputs) == [
        ("signal", "float32", ("batch", 8), 0), ("code", "int64", ("batch", 4), 0),
    ]  # fmt: skip
    assert described(signature.outputs) == [
        ("position", "float32", ("batch", 3), 0), ("kind", "float32", ("batch", 5), 0),
    ]  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    assert config["output_layers"] == ["network.position", "network.kind"]
    assert config["linear_layers"] == 2


@pytest.mark.parametrize(("function", "names"), [("several", ["output_0", "output_1"]), ("failing", None)])
def test_outputs_of_a_tuple_are_numbered(function, names, tmp_path):
    array_modules.write_module(tmp_path, function)
    if names is None:
        with raises_code("module-failed", InputError):
            plan(tmp_path, function)
    else:
        signature = read_signature(plan(tmp_path, function).local_model)
        assert [value.name for value in signature.outputs] == names


def test_optional_input_is_used_if_the_samples_have_it(tmp_path):
    array_modules.write_module(tmp_path, "denoiser")
    inputs = []
    for changed in (False, True):
        if changed:
            for path in tmp_path.glob("*.npz"):
                np.savez(path, image=np.load(path)["image"])
        signature = read_signature(plan(tmp_path, "denoiser").local_model)
        inputs.append([value.name for value in signature.inputs])
    assert inputs == [["image", "gain"], ["image"]]


@pytest.mark.parametrize(("function", "code"), [
    ("integers", "wrong-output"), ("mean", "wrong-output"), ("nothing", "wrong-output"),
    ("text", "wrong-output"), ("renamed", "wrong-output"), ("pair", "wrong-output"),
    ("reserved", "reserved-name"), ("unnamed", "no-inputs"),
])  # fmt: skip
def test_module_of_another_form_is_refused(function, code, tmp_path):
    array_modules.write_module(tmp_path, function)
    with raises_code(code, InputError):
        plan(tmp_path, function)


def test_missing_array_is_reported_with_similar_ones(tmp_path):
    array_modules.write_module(tmp_path, "two_heads")
    np.savez(tmp_path / "train.npz", signals=np.zeros((4, 8)), code=np.zeros((4, 4), int))
    with raises_code("does-not-fit-graph", InputError) as refused:
        plan(tmp_path, "two_heads")
    assert "'signals'" in str(refused.value)


def test_samples_of_other_splits_must_have_the_shapes_of_the_first(tmp_path):
    array_modules.write_module(tmp_path, "two_heads")
    np.savez(tmp_path / "test.npz", signal=np.zeros((4, 9)), code=np.zeros((4, 4), int))
    with raises_code("does-not-fit-graph", InputError):
        plan(tmp_path, "two_heads")


@pytest.mark.parametrize(("model", "data", "code"), [
    ({"labels": "[a, b]"}, "", "does-not-fit-task"), ({"image_size": 12}, "", "does-not-fit-task"),
    ({}, ", axes: {image: 1}", "wrong-axis"),
])  # fmt: skip
def test_settings_of_other_models_are_refused(model, data, code, tmp_path):
    array_modules.write_module(tmp_path, "denoiser")
    with raises_code(code, InputError):
        plan(tmp_path, "denoiser", data=data, **model)


def test_folder_of_calls_is_refused(tmp_path):
    array_modules.write_module(tmp_path, "denoiser")
    (tmp_path / "train.npz").rename(tmp_path / "one.npz")
    (tmp_path / "train.npz").mkdir()
    (tmp_path / "one.npz").rename(tmp_path / "train.npz" / "one.npz")
    with pytest.raises(InputError) as refused:
        plan(tmp_path, "denoiser")
    assert "missing-file" in error_codes(refused.value)


@pytest.mark.parametrize(("stage", "code"), [
    ("finetune", "does-not-fit-task"), ("prune: {targets: [channels]}", "does-not-fit-model"),
    ("drop-layers: {layers: 1}", "does-not-fit-model"), ("rotate", "does-not-fit-model"),
    ("trim-vocabulary", "unsupported-task"), ("onnx: {dtype: fp16}", "unsupported-dtype"),
    ("onnx: {target: openvino}", "unsupported-task"), ("onnx: {batch_size: 1}", "unsupported-task"),
    ("onnx: {sequence_length: 8}", "unsupported-task"), ("onnx: {autotune: true}", "unsupported-task"),
    ("distill: {losses: {labels: 1.0}}", "unknown-loss"),
    ("distill: {losses: {hidden_states: 1.0}}", "does-not-fit-task"),
    ("distill: {cache_logits: {}}", "does-not-fit-task"),
    ("distill: {losses: {hidden_states: 1.0}, layer_map: {network.strt: network.end}}", "unknown-module"),
    ("factorize: {targets: [embeddings]}", "does-not-fit-model"),
    ("sparsify: {targets: [ffn]}", "does-not-fit-model"),
])  # fmt: skip
def test_stages_that_do_not_fit_are_refused(stage, code, tmp_path):
    array_modules.write_module(tmp_path, "denoiser")
    with pytest.raises(InputError) as refused:
        plan(tmp_path, "denoiser", (stage,))
    assert error_codes(refused.value) == [code]
