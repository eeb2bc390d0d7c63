"""A user's PyTorch module as a model: loaded from its folder, its layers and norms, whose code is trusted."""

import shutil

import pytest
import torch
from torch import nn

from smelt.core.errors import InputError, RunError
from smelt.core.files import read_json_object, write_json
from smelt.core.user_code import first_on_path, import_current
from smelt.models.checkpoint import load_model, save_model
from smelt.models.edits import fold_batch_norms
from smelt.models.operations import count_operations
from smelt.models.user_module import build_module, inner_linear_layers, traced_conv_norms
from tests.support.expected_errors import raises_code
from tests.support.models import user_modules


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pixels(count=2):
    return torch.randn(count, 3, *user_modules.SIZE, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model):
    return model(pixel_values=pixels()).logits


@pytest.mark.parametrize("function", ["cnn", "mixer", "attentive", "branching"])
def test_loaded_model_computes_like_the_module(function, tmp_path):
    model, edits = load_model(user_modules.model_folder(tmp_path / "own", function))
    assert edits == []
    with torch.no_grad():
        assert torch.equal(logits(model), user_modules.build(function)(pixels()))


def test_weights_are_saved_under_the_modules_prefix(tmp_path):
    source = user_modules.model_folder(tmp_path / "own", "cnn")
    model, edits = load_model(source)
    (tmp_path / "saved").mkdir()
    save_model(model, edits, tmp_path / "saved", source)
    assert torch.equal(logits(load_model(tmp_path / "saved")[0]), logits(model))


def test_code_that_no_recipe_named_is_not_imported(tmp_path, monkeypatch):
    folder = user_modules.model_folder(tmp_path / "own", "cnn")
    copied = shutil.copytree(folder, tmp_path / "copied", symlinks=False)
    shutil.copyfile(tmp_path / "own" / "nets.py", copied / "nets.py")
    (copied / "nets.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\n" + user_modules.CODE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with raises_code("untrusted-module", InputError):
        load_model(copied)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("change", [
    {"module": "os:getcwd"}, {"source_hash": "../../own"}, {"source_hash": ""}, {"module": "nets:mixer"},
])  # fmt: skip
def test_config_names_recorded_code_by_function_and_hash(change, tmp_path):
    folder = user_modules.model_folder(tmp_path / "own", "cnn")
    write_json(folder / "config.json", read_json_object(folder / "config.json") | change)
    with raises_code("untrusted-module", InputError):
        load_model(folder)


def test_edited_copy_of_recorded_code_is_not_imported(tmp_path):
    folder = user_modules.model_folder(tmp_path / "own", "cnn")
    (recorded,) = (tmp_path / "cache").rglob("nets.py")
    recorded.write_text("raise ValueError")
    with raises_code("untrusted-module", InputError):
        load_model(folder)


def test_batch_norm_is_folded_if_nothing_else_reads_the_convolution(tmp_path):
    folder = user_modules.model_folder(tmp_path / "own", "cnn")
    model, _ = load_model(folder)
    pairs = [("stem.0", "stem.1")]
    for block in ("blocks.0", "blocks.2"):
        pairs += [(f"{block}.conv1", f"{block}.norm1"), (f"{block}.conv2", f"{block}.norm2")]
    assert traced_conv_norms(model) == [(f"network.{a}", f"network.{b}") for a, b in pairs]
    expected = logits(model)
    edits = fold_batch_norms(model)
    assert len(edits) == len(pairs)
    (tmp_path / "folded").mkdir()
    save_model(model, edits, tmp_path / "folded", folder)
    folded = load_model(tmp_path / "folded")[0]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert torch.allclose(logits(folded), expected, atol=1e-5 * float(expected.abs().max()))


def test_error_in_forward_names_file_and_line(tmp_path):
    model, _ = load_model(user_modules.model_folder(tmp_path / "own", "limited"))
    line = user_modules.CODE.splitlines().index('            raise ValueError("at most 4 images")') + 1
    with raises_code("module-failed", RunError) as raised:
        model(pixel_values=pixels(5))
    assert f"nets.py, line {line}" in str(raised.value)
    assert isinstance(raised.value.__cause__, ValueError)


def test_output_of_an_import_is_written_to_standard_error(tmp_path, capsys):
    (tmp_path / "printing_import.py").write_text("print('imported')")
    with first_on_path(tmp_path):
        import_current("printing_import", tmp_path)
    assert capsys.readouterr() == ("", "imported\n")


def test_operations_of_forward_that_reads_values_are_not_counted(tmp_path):
    model, _ = load_model(user_modules.model_folder(tmp_path / "own", "branching"))
    with raises_code("data-dependent-forward", RunError):
        count_operations(model, user_modules.SIZE)


def test_built_module_is_in_eval_mode(tmp_path):
    config = load_model(user_modules.model_folder(tmp_path / "own", "training"))[0].config
    assert not any(module.training for module in build_module(config.module, config.source_hash).modules())


@pytest.mark.parametrize("function", ["attentive", "branching"])
def test_norms_of_a_subclass_or_in_untraceable_code_are_not_folded(function, tmp_path):
    assert fold_batch_norms(load_model(user_modules.model_folder(tmp_path / "own", function))[0]) == []


def test_layers_that_are_read_without_a_call_are_fixed(tmp_path):
    model, _ = load_model(user_modules.model_folder(tmp_path / "own", "attentive"))
    assert model.config.fixed_layers == ["network.attention.out_proj", "network.read"]
    assert list(inner_linear_layers(model)) == ["network.inner"]
