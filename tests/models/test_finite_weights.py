"""Weights that are no numbers are refused by file and tensor; what may be infinite is not."""

import shutil
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

from smelt.core.errors import InputError
from smelt.models.weight_files import WEIGHTS_FILE, require_finite_weights
from tests.support.expected_errors import raises_code
from tests.support.models import causal, tiny

UP = "transformer.h.1.mlp.c_fc.weight"


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    return {"gpt2": causal.write_model(home / "gpt2", "gpt2"), "marian": tiny.write_marian(home / "marian")}


def _with(folder: Path, to: Path, **change: float) -> Path:
    """Copy a model; the first number of each named tensor is another one."""
    shutil.copytree(folder, to)
    tensors = load_file(to / WEIGHTS_FILE)
    for name, value in change.items():
        tensors[name].view(-1)[0] = value
    save_file(tensors, to / WEIGHTS_FILE, metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_non_finite_weight_is_rejected_with_name(model_folders, value, tmp_path):
    folder = _with(model_folders["gpt2"], tmp_path / "m", **{UP: float(value)})
    kind = value.strip("-").replace("nan", "NaN")
    with raises_code("non-finite-weights", InputError) as caught:
        require_finite_weights(folder)
    assert all(part in str(caught.value) for part in ("m/model.safetensors", f"'{UP}'", f" {kind} ", "2,048"))


def test_other_non_finite_tensors_are_counted(model_folders, tmp_path):
    names = [f"transformer.h.{index}.mlp.c_fc.weight" for index in (0, 1)]
    folder = _with(model_folders["gpt2"], tmp_path / "m", **dict.fromkeys(names, float("nan")))
    with raises_code("non-finite-weights", InputError) as caught:
        require_finite_weights(folder)
    assert all(part in str(caught.value) for part in ("2,048", " 1 others"))


def test_minus_infinite_logits_bias_is_allowed(model_folders, tmp_path):
    require_finite_weights(model_folders["marian"])
    tensors = load_file(model_folders["marian"] / WEIGHTS_FILE)
    assert "final_logits_bias" in tensors
    require_finite_weights(
        _with(model_folders["marian"], tmp_path / "never", final_logits_bias=float("-inf"))
    )
    for value in ("nan", "inf"):  # inf would be a token that is always given
        folder = _with(model_folders["marian"], tmp_path / value, final_logits_bias=float(value))
        with raises_code("non-finite-weights", InputError) as caught:
            require_finite_weights(folder)
        assert "final_logits_bias" in str(caught.value)
        assert value in str(caught.value).casefold()


def test_unused_tensors_are_not_checked(model_folders, tmp_path):
    shutil.copytree(model_folders["gpt2"], tmp_path / "m")
    tensors = load_file(tmp_path / "m" / WEIGHTS_FILE)
    tensors["transformer.h.0.attn.masked_bias"] = tensors[UP].view(-1)[:1] * float("inf")
    save_file(tensors, tmp_path / "m" / WEIGHTS_FILE, metadata={"format": "pt"})
    require_finite_weights(tmp_path / "m")


def test_non_finite_pooler_is_rejected_only_if_used(tmp_path):
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "whole")
    folder = _with(tmp_path / "whole", tmp_path / "m", **{"pooler.dense.weight": float("nan")})
    require_finite_weights(folder, embeds=True)  # a sentence embedder
    with raises_code("non-finite-weights", InputError) as caught:
        require_finite_weights(folder)  # a classifier
    assert "pooler.dense.weight" in str(caught.value)
