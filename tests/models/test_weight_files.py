"""The weights are the files that transformers takes, and nothing that is next to them."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForSequenceClassification

from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model
from smelt.models.weight_files import find_weights, has_weights, read_header, value_count, weight_tensors
from smelt.pipeline.inspect.model_folder import check_model_folder
from tests.support.expected_errors import raises_code
from tests.support.models import tiny


@pytest.fixture
def folder(tmp_path):
    return tiny.write_bert(tmp_path / "m")


def _stray(path, like):
    """Write other weights, all with other values, and one tensor that the model does not have."""
    tensors = {name: tensor + 1 for name, tensor in load_file(like).items()}
    save_file(tensors | {"stray": torch.zeros(1000)}, path, metadata={"format": "pt"})


def _shards(folder, into=3):
    """Split the weights over several files with an index, as transformers does."""
    config = BertConfig.from_pretrained(folder)
    model = BertForSequenceClassification.from_pretrained(folder, config=config)
    size = (folder / "model.safetensors").stat().st_size
    model.save_pretrained(folder, max_shard_size=size // into)
    (folder / "model.safetensors").unlink()  # which transformers leaves there
    return sorted(path.name for path in folder.glob("model-*.safetensors"))


def _read(folder):
    """Return what smelt finds: name -> values of all tensors."""
    values = {}
    for path, name, entry in weight_tensors(folder):
        assert name not in values
        values[name] = load_file(path)[name]
        assert value_count(entry) == values[name].numel()
    return values


def _taken_by_transformers(folder):
    return BertForSequenceClassification.from_pretrained(folder).state_dict()


def _require_same(folder):
    expected, tensors = _taken_by_transformers(folder), _read(folder)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


STRAYS = ["model.variant.safetensors", "model.fp16.safetensors", "adapter_model.safetensors", "a.safetensors"]


@pytest.mark.parametrize("name", STRAYS)
def test_stray_file_next_to_single_file_is_ignored(folder, name):
    _stray(folder / name, folder / "model.safetensors")
    _require_same(folder)
    assert [path.name for path in find_weights(folder).files] == ["model.safetensors"]


@pytest.mark.parametrize("name", [*STRAYS, "model-00009-of-00009.safetensors"])
def test_stray_file_next_to_shards_is_ignored(folder, name):
    names = _shards(folder)
    assert len(names) > 2
    _stray(folder / name, folder / names[0])
    _require_same(folder)
    weights = find_weights(folder)
    assert [path.name for path in weights.files] == names
    assert weights.index == folder / "model.safetensors.index.json"


def test_single_file_takes_precedence_over_shards(folder):
    tensors = load_file(folder / "model.safetensors")
    names = _shards(folder)
    for name in names:
        _stray(folder / name, folder / name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _require_same(folder)
    assert find_weights(folder).index is None


def test_weights_file_named_in_config_takes_precedence(folder):
    (folder / "model.safetensors").rename(folder / "chosen.safetensors")
    _stray(folder / "model.safetensors", folder / "chosen.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "chosen.safetensors"}))
    _require_same(folder)
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "../m.safetensors"}))
    with raises_code("path-outside-folder", InputError) as caught:
        find_weights(folder)
    assert all(part in str(caught.value) for part in ("config.json", "../m.safetensors"))


def test_index_named_in_config_is_used(folder):
    names = _shards(folder)
    (folder / "model.safetensors.index.json").rename(folder / "other.safetensors.index.json")
    config = json.loads((folder / "config.json").read_text())
    config_with_index = config | {"transformers_weights": "other.safetensors.index.json"}
    (folder / "config.json").write_text(json.dumps(config_with_index))
    _require_same(folder)
    assert [path.name for path in find_weights(folder).files] == names


def test_duplicate_tensor_is_read_from_shard_in_index(folder):
    original = load_file(folder / "model.safetensors")
    names = _shards(folder)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    duplicate = next(name for name, file in weight_map.items() if file == names[0])
    tensors = load_file(folder / names[-1])
    save_file(tensors | {duplicate: original[duplicate] + 1}, folder / names[-1], metadata={"format": "pt"})
    assert torch.equal(_read(folder)[duplicate], original[duplicate])


def test_index_with_missing_file_is_rejected(folder):
    names = _shards(folder)
    (folder / names[1]).unlink()
    with raises_code("missing-file", InputError) as caught:
        list(weight_tensors(folder))
    assert str(caught.value).startswith(f"{folder / names[1]}: ")
    assert "model.safetensors.index.json" in str(caught.value)


def test_shard_without_indexed_tensor_is_rejected(folder):
    names = _shards(folder)
    tensors = load_file(folder / names[0])
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, folder / names[0])
    with raises_code("missing-tensor", InputError) as caught:
        list(weight_tensors(folder))
    assert str(caught.value).startswith(f"{folder / names[0]}: ")
    assert all(part in str(caught.value) for part in (f"'{lost}'", "model.safetensors.index.json"))


@pytest.mark.parametrize(("content", "code"), [
    ("[]", "damaged-file"), ("{", "damaged-file"), ('{"weight_map": {}}', "empty-index"),
    ('{"weight_map": {"w": "../model.safetensors"}}', "path-outside-folder"),
    ('{"weight_map": {"w": "a/model.safetensors"}}', "path-outside-folder"),
    ('{"weight_map": {"w": "a\\\\model.safetensors"}}', "path-outside-folder"),
    ('{"weight_map": {"w": ".."}}', "path-outside-folder"),
    ('{"weight_map": {"w": ""}}', "path-outside-folder"),
])  # fmt: skip
def test_invalid_index_is_rejected(folder, content, code):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    with raises_code(code, InputError):
        find_weights(folder)
    assert has_weights(folder)


def test_folder_without_weights_is_rejected_with_candidates(tmp_path):
    assert not has_weights(tmp_path)
    with raises_code("missing-weights", InputError):
        find_weights(tmp_path)
    (tmp_path / "model.fp16.safetensors").touch()
    with raises_code("missing-weights", InputError) as caught:
        find_weights(tmp_path)
    assert "model.fp16.safetensors" in str(caught.value)


@pytest.mark.parametrize("content", [
    b"", b"\x10", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 4) + b"[1]]",
    struct.pack("<Q", 2) + b"[]",
])  # fmt: skip
def test_damaged_header_is_rejected(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with raises_code("damaged-weights", InputError):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize("change", [
    {"num_hidden_layers": 10_000_000}, {"hidden_size": 2**40}, {"vocab_size": 10**12},
    {"intermediate_size": 10**10}, {"depths": [1, 10_000_000]}, {"hidden_sizes": [8, 2**40]},
])  # fmt: skip
def test_config_larger_than_stored_tensors_is_rejected_before_loading(folder, change):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with raises_code("config-exceeds-weights", InputError):
        load_model(folder)
    problems, _ = check_model_folder(folder, "text-classification")
    assert message_codes(problems) == ["config-exceeds-weights"]
    assert next(iter(change)) in problems[0].message
