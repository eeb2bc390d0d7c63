"""What old checkpoints hold for nothing is left aside; nothing else is."""

import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from smelt.core.errors import InputError
from smelt.models.checkpoint import load_model
from smelt.models.model_size import count_parameters
from smelt.models.weight_files import is_unused_tensor
from tests.support.expected_errors import raises_code
from tests.support.models import every_family
from tests.support.pairs import matrix

FAMILIES = ["marian", "t5", "bart", "mbart", "bert", "distilbert", "roberta", "gpt2", "llama", "qwen2", "opt"]
NOBODYS = [
    "my_position_adapter.weight", "bert.embeddings.position_ids.adapter", "encoder.position_ids_table.weight",
    "model.encoder.relative_positions.weight", "transformer.h.0.attn.c_attn.bias2",
]  # fmt: skip
# Family, tensor, and where it was seen.
SEEN = [
    # bert-base-uncased and all that was trained from it before transformers 4.31
    # (huggingface/transformers issue 25330)
    ("bert", "bert.embeddings.position_ids"), ("distilbert", "distilbert.embeddings.position_ids"),
    ("roberta", "roberta.embeddings.position_ids"),
    # cardiffnlp/twitter-roberta-base-sentiment-latest (cardiffnlp/tweeteval issue 21)
    ("roberta", "roberta.pooler.dense.weight"), ("roberta", "roberta.pooler.dense.bias"),
    # gpt2, whose file has no "transformer." before its names (huggingface/transformers pull request 24113)
    ("gpt2", "h.1.attn.bias"),
    # checkpoints of GPT2LMHeadModel from transformers 2.9.1 on (huggingface/transformers issue 24581)
    ("gpt2", "transformer.h.0.attn.bias"), ("gpt2", "transformer.h.0.attn.masked_bias"),
    # 01-ai/Yi (unslothai/unsloth issue 270), jzhang38/TinyLlama (its issue 127)
    ("llama", "model.layers.1.self_attn.rotary_emb.inv_freq"),
    ("qwen2", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    # t5-small, allenai/unifiedqa-t5-large, castorini/monot5-3b (huggingface/transformers issue 8933)
    ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
    # facebook/bart-large (huggingface/transformers issue 6652)
    ("bart", "encoder.version"), ("bart", "model.decoder.version"), ("mbart", "model.encoder.version"),
    # OPTPreTrainedModel of transformers 4.19 to 4.31 (_keys_to_ignore_on_load_unexpected)
    ("opt", "model.decoder.version"),
]  # fmt: skip


@pytest.fixture(scope="module")
def models():
    """Give a model's folder by family, made once, with its tensors as loaded and its number of values."""
    cache = {}

    def get(family):
        if family not in cache:
            folder = every_family.model_with_layers(family, 2)
            cache[family] = folder, load_model(folder)[0].state_dict(), count_parameters(folder)
        return cache[family]

    return get


def _with(folder, into, **extra):
    """Copy the model with more tensors in its file."""
    into.mkdir()
    for path in folder.iterdir():
        (into / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    assert not tensors.keys() & extra.keys()
    save_file(tensors | extra, into / "model.safetensors", metadata={"format": "pt"})
    return into


@pytest.mark.parametrize(("family", "name"), SEEN)
def test_unused_tensors_of_old_checkpoints_are_ignored_and_not_counted(models, tmp_path, family, name):
    folder, expected, count = models(family)
    old = _with(folder, tmp_path / "old", **{name: torch.ones(1, 7)})
    tensors = load_model(old)[0].state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)
    assert count_parameters(old) == count


@pytest.mark.parametrize(("family", "name"), matrix.matrix_cells(FAMILIES, NOBODYS))
def test_unknown_tensor_is_rejected_with_name(models, tmp_path, family, name):
    folder, _, _ = models(family)
    odd = _with(folder, tmp_path / "odd", **{name: torch.ones(2)})
    with raises_code("unknown-tensor", InputError) as caught:
        load_model(odd)
    assert name in str(caught.value)


def test_many_unknown_tensors_are_counted(models, tmp_path):
    odd = _with(models("bert")[0], tmp_path / "odd", **{f"my.{n}": torch.ones(2) for n in range(8)})
    with raises_code("unknown-tensor", InputError) as caught:
        load_model(odd)
    assert all(part in str(caught.value) for part in ("my.0, my.1, my.2, my.3, my.4", " 3 "))


@pytest.mark.quick
def test_unused_tensors_are_specific_to_family():
    for family, name in SEEN:
        for other in set(FAMILIES) - {family}:
            if (other, name) not in SEEN and not {family, other} <= {"llama", "qwen2"}:
                same = {family, other} <= {"bart", "mbart", "opt"} or name.endswith("embeddings.position_ids")
                assert same or not is_unused_tensor(other, name), (other, name)


def test_heads_are_ignored_only_if_a_new_one_is_created():
    # bert-base-uncased as a classifier (huggingface/transformers issue 5421)
    for name in ("cls.predictions.bias", "cls.seq_relationship.weight", "qa_outputs.bias"):
        assert is_unused_tensor("bert", name, new_head=True)
        assert not is_unused_tensor("bert", name)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_model_tensor_is_unused(models, family):
    _, tensors, _ = models(family)
    inner_tensors = [name for name in tensors if not re.match(r"(pre_)?classifier\.", name)]
    assert [name for name in inner_tensors if is_unused_tensor(family, name, new_head=True)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_ignored_by_transformers_are_ignored(models, family):
    """Each pattern of the model class, as far as it is a name or nearly one, is one of ours."""
    folder, _, _ = models(family)
    model = load_model(folder)[0]
    for pattern in model._keys_to_ignore_on_load_unexpected or ():
        full = {"attn.bias": "h.0.attn.bias", "crossattention.bias": "h.0.crossattention.bias"}
        assert is_unused_tensor(family, full.get(pattern, pattern)), pattern


def test_gamma_and_beta_are_read_as_norm_weight_and_bias(models, tmp_path):
    """As bert-base-uncased does (huggingface/transformers issue 11809)."""
    folder, expected, _ = models("bert")
    old = _with(folder, tmp_path / "old")
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(old / "model.safetensors").items()
    }
    assert sum(name.endswith(("gamma", "beta")) for name in tensors) == 10
    save_file(tensors, old / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(old)[0].state_dict()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    reference = transformers.BertForSequenceClassification.from_pretrained(old).state_dict()
    assert all(torch.equal(reference[key], expected[key]) for key in expected)
