"""A PyTorch module as the model of a recipe: what the plan shows, and what it refuses before any work."""

import json
import pickle
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.pipeline.plan.load_plan import load_plan
from tests.support.expected_errors import message_locations, raises_code
from tests.support.models import user_modules


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    for function in ("cnn", "mixer"):
        user_modules.write_module(folder, function)
    return folder


def test_plan_names_the_code_that_it_runs(folder):
    plan = load_plan(user_modules.write_recipe(folder))
    assert "nets:cnn" in str(plan)
    assert "cnn.safetensors" in str(plan)
    assert "module-imported" in message_codes(plan.notes)
    config = json.loads((plan.local_model / "config.json").read_text())
    assert (config["linear_layers"], config["convolutions"]) == (0, 7)
    assert config["id2label"] == {"0": "dark", "1": "light"}


def test_portable_recipe_has_absolute_paths_to_weights(folder):
    plan = load_plan(user_modules.write_recipe(folder))
    assert str(folder / "cnn.safetensors") in plan.portable_recipe()
    assert plan.user_functions == ["nets:cnn"]


@pytest.mark.parametrize(("model", "code"), [
    ({"module": "absent:cnn"}, "module-not-found"), ({"module": "nets:absent"}, "module-failed"),
    ({"module": "nets:broken"}, "module-failed"), ({"module": "nets:text"}, "module-failed"),
    ({"module": "nets"}, "wrong-value"), ({"weights": None}, "missing-setting"),
    ({"weights": "absent.safetensors"}, "missing-file"), ({"weights": "cnn.pt"}, "pickled-weights"),
    ({"weights": "mixer.safetensors"}, "missing-tensor"), ({"labels": "[a, b, c]"}, "labels-mismatch"),
    ({"image_size": None}, "missing-setting"), ({"processor": "p.json"}, "settings-conflict"),
    ({"image_size": 20}, "module-failed"), ({"tokenizer": "x"}, "does-not-fit-task"),
])  # fmt: skip
def test_invalid_model_is_refused(model, code, folder):
    (folder / "cnn.pt").write_bytes(pickle.dumps({}))
    with raises_code(code, InputError):
        load_plan(user_modules.write_recipe(folder, **model))


@pytest.mark.parametrize(("model", "code", "setting"), [
    ({"image_size": 16.5}, "wrong-value", "model.image_size"),
    ({"image_size": 0}, "wrong-value", "model.image_size"),
    ({"image_size": "true"}, "wrong-value", "model.image_size"),
    ({"labels": "red"}, "wrong-value", "model.labels"),
    ({"module": "nets.cnn"}, "wrong-value", "model.module"),
    ({"module": "nets.py:cnn"}, "wrong-value", "model.module"),
    ({"image_sise": 16}, "unknown-setting", "model.image_sise"),
])  # fmt: skip
def test_error_is_about_the_key_that_is_wrong(model, code, setting, folder):
    recipe = user_modules.write_recipe(folder, **model)
    lines = recipe.read_text().splitlines()
    key = f"  {setting.removeprefix('model.')}: "
    with raises_code(code, InputError) as refused:
        load_plan(recipe)
    line = next(number for number, text in enumerate(lines, start=1) if text.startswith(key))
    assert message_locations(refused.value.messages) == [(code, setting, line)]


def test_unknown_setting_lists_each_setting_of_a_module_once(folder):
    with raises_code("unknown-setting", InputError) as refused:
        load_plan(user_modules.write_recipe(folder, image_sise=16))
    words = re.findall(r"\w+", str(refused.value))
    assert words.count("weights") == 1
    assert words.count("image_size") == 2  # also as the one that was meant
    assert "config" not in words  # of an untrained model


def test_absent_module_is_reported_with_the_folder(folder, monkeypatch):
    recipe = user_modules.write_recipe(folder, module="net:cnn")
    monkeypatch.chdir(folder)
    with raises_code("module-not-found", InputError) as refused:
        load_plan(recipe.relative_to(folder))
    assert f"'{folder}'" in str(refused.value)
    assert "'nets'" in str(refused.value)


def test_function_of_an_installed_package_is_to_be_called_by_an_own_one(folder):
    texts = []
    for function in ("torch.nn:Identity", "no_such_package.nn:Identity"):
        with raises_code("module-not-found", InputError) as refused:
            load_plan(user_modules.write_recipe(folder, module=function))
        texts.append(str(refused.value))
    assert "'torch.nn:Identity'" in texts[0]
    assert "'no_such_package.nn:Identity'" not in texts[1]


def test_absent_function_is_reported_with_the_functions_of_the_module(folder):
    with raises_code("module-failed", InputError) as refused:
        load_plan(user_modules.write_recipe(folder, module="nets:mixr"))
    assert {"cnn", "mixer", "tied"} <= set(re.findall(r"\w+", str(refused.value)))
    assert "Mixer" not in str(refused.value)  # a class


@pytest.mark.parametrize(("function", "code"), [("features", "wrong-output"), ("tied", "shared-weights")])
def test_module_of_unsupported_form_is_refused(function, code, tmp_path):
    network = user_modules.build(function)
    user_modules.write_module(tmp_path, "cnn")
    tensors = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    save_file(tensors, tmp_path / f"{function}.safetensors")
    with raises_code(code, InputError):
        load_plan(user_modules.write_recipe(tmp_path, function))


def test_tensors_of_other_shapes_and_names_are_refused(tmp_path):
    user_modules.write_module(tmp_path)
    tensors = load_file(tmp_path / "cnn.safetensors")
    more = {"more": tensors["head.bias"]}
    for code, change in {
        "unknown-tensor": more,
        "shape-mismatch": {"head.bias": tensors["stem.0.bias"]},
    }.items():
        save_file({name: t.clone() for name, t in (tensors | change).items()}, tmp_path / "cnn.safetensors")
        with raises_code(code, InputError):
            load_plan(user_modules.write_recipe(tmp_path))


def test_other_tasks_are_refused(folder):
    path = user_modules.write_recipe(folder)
    path.write_text(path.read_text().replace("image-classification", "summarization"))
    with raises_code("several-errors", InputError) as refused:  # also of the data
        load_plan(path)
    assert "does-not-fit-task" in [message.code for message in refused.value.messages]


@pytest.mark.parametrize(("function", "stage"), [
    ("cnn", "prune: {keep_ratio: 0.5}"), ("cnn", "prune: {targets: [width]}"), ("cnn", "rotate"),
    ("cnn", "drop-layers: {layers: 1}"), ("cnn", "share-weights: {layers_per_group: 2}"),
    ("cnn", "sparsify"), ("mixer", "sparsify: {targets: [ffn]}"), ("cnn", "factorize"),
    ("cnn", "factorize: {targets: [embeddings]}"), ("cnn", "quantize: {scheme: int8-static, method: gptq}"),
    ("mixer", "quantize: {scheme: int4, method: awq}"),
    ("mixer", "quantize: {scheme: int8-static, smoothquant_alpha: 0.5}"),
    ("mixer", "quantize: {mixed_precision: {target_bits: 5}}"), ("mixer", "finetune: {lora: {r: 2}}"),
])  # fmt: skip
def test_stages_that_need_blocks_are_refused(function, stage, folder):
    with raises_code("does-not-fit-model", InputError):
        load_plan(user_modules.write_recipe(folder, function, (stage,)))


@pytest.mark.parametrize("scheme", ["int4", "int8-dynamic"])
def test_scheme_of_linear_layers_is_refused_if_there_is_only_the_output_layer(scheme, folder):
    with raises_code("only-output-layer", InputError):
        load_plan(user_modules.write_recipe(folder, "cnn", (f"quantize: {{scheme: {scheme}}}",)))


@pytest.mark.parametrize(("network", "setting"), [("unlayered", ""), ("head_only", ", output_layer: false")])
def test_module_without_a_layer_to_quantize_is_refused(network, setting, tmp_path):
    folder = user_modules.write_module(tmp_path)
    quantize = "quantize: {scheme: int8-static" + setting + "}"
    code = (folder / "nets.py").read_text()
    (folder / "nets.py").write_text(code + UNLAYERED)
    save_file({"scale": torch.ones(3), "bias": torch.zeros(2)}, folder / "unlayered.safetensors")
    head = {"head.weight": torch.ones(2, 3), "head.bias": torch.zeros(2)}
    save_file(head, folder / "head_only.safetensors")
    with raises_code("no-layer-selected", InputError):
        load_plan(user_modules.write_recipe(folder, network, (quantize,)))
    if network == "head_only":
        load_plan(user_modules.write_recipe(folder, network, ("quantize: {scheme: int8-static}",)))


UNLAYERED = """

class Unlayered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.bias = torch.nn.Parameter(torch.zeros(2))

    def forward(self, images):
        return (images.mean((2, 3)) * self.scale).sum(1, keepdim=True) + self.bias


class HeadOnly(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 2)

    def forward(self, images):
        return self.head(images.mean((2, 3)))


def unlayered():
    return Unlayered()


def head_only():
    return HeadOnly()
"""


def test_pruning_without_torch_pruning_is_refused(folder, monkeypatch):
    recipe = user_modules.write_recipe(folder, "cnn", ("prune: {targets: [channels]}",))
    load_plan(recipe)
    monkeypatch.setattr("smelt.core.system.installed_version", lambda name: None)
    with raises_code("not-installed", InputError):
        load_plan(recipe)
