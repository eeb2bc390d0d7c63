"""Models of images are read whole: older names, and the statistics that batch norms keep with weights."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from smelt.core.errors import InputError
from smelt.models.checkpoint import load_model
from smelt.models.hidden_width import hidden_axes
from smelt.models.import_model import import_model
from smelt.training.checkpoint_selector import CheckpointSelector
from tests.support.expected_errors import raises_code
from tests.support.models import images

OLDER = {
    r"^vit\.layers\.": "vit.encoder.layer.", r"attention\.q_proj": "attention.attention.query",
    r"attention\.k_proj": "attention.attention.key", r"attention\.v_proj": "attention.attention.value",
    r"attention\.o_proj": "attention.output.dense", r"mlp\.fc1": "intermediate.dense",
    r"mlp\.fc2": "output.dense",
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: images.write_model(root / family, family) for family in images.CONFIGS}


def older(name):
    for pattern, instead in OLDER.items():
        name = re.sub(pattern, instead, name)
    return name


def test_tensors_with_legacy_names_are_renamed(folders, tmp_path):
    old = shutil.copytree(folders["vit"], tmp_path / "old")
    tensors = load_file(old / "model.safetensors")
    save_file({older(name): t for name, t in tensors.items()}, old / "model.safetensors", {"format": "pt"})
    (tmp_path / "new").mkdir()
    import_model(old, tmp_path / "new")
    state = load_file(tmp_path / "new" / "model.safetensors")
    assert set(state) == set(tensors)
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)


def test_batch_norm_without_statistics_is_reported(folders, tmp_path):
    folder = shutil.copytree(folders["resnet"], tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["resnet.embedder.embedder.normalization.running_mean"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with raises_code("missing-tensor", InputError) as caught:
        load_model(folder)
    assert "resnet.embedder.embedder.normalization.running_mean" in str(caught.value)


def test_best_weights_are_restored_with_their_statistics(folders):
    model, _ = load_model(folders["resnet"])
    keeper = CheckpointSelector(model, None, lambda *_: None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    keeper.best_weights = keeper._copy_weights()
    model.train()
    model(torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)))
    name = "resnet.embedder.embedder.normalization.running_var"
    assert not torch.equal(model.state_dict()[name], before[name])
    keeper.load_best()
    assert torch.equal(model.state_dict()[name], before[name])


def test_all_axes_of_hidden_size_of_a_vision_transformer_are_known(folders):
    model, _ = load_model(folders["vit"])
    axes = {(axis.name, axis.dim) for axis in hidden_axes(model)}
    width = model.config.hidden_size
    products = {f"{p}_proj" for p in "qkv"}
    expected = {
        (name, dim)
        for name, tensor in model.named_parameters()
        for dim, size in enumerate(tensor.shape)
        if size == width
        # what stands between two products is as wide by chance
        and not (dim == 0 and any(product in name for product in products))
        and not (dim == 1 and "o_proj" in name)
    }
    assert axes == expected
