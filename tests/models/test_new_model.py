"""Models with random weights: the class's own, and a config that agrees with the tokenizer."""

import re

import numpy as np
import pytest
import torch
import transformers

from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.generation.config import make_shortlist, write_shortlist
from smelt.models.checkpoint import load_model, load_tokenizer
from smelt.models.new_model import config_for_tokenizer, create_model
from smelt.models.text_rules import SHORTLIST_FILE as SHORTLIST
from tests.support.expected_errors import raises_code
from tests.support.models import tiny
from tests.support.models.untrained_models import CONFIGS, ENCODER, make_untrained


@pytest.mark.parametrize("family", ["marian", "t5", "bart", "bert", "gpt2", "llama"])
def test_new_model_of_each_family_loads_and_matches_tokenizer(tmp_path, family):
    labels = ["no", "yes", "maybe"] if CONFIGS[family][0] == "text-classification" else []
    folder, notes = make_untrained(tmp_path, family, labels=labels)
    assert notes == []
    model, edits = load_model(folder)
    tokenizer = load_tokenizer(folder)
    config = model.config
    assert edits == []
    assert config.vocab_size == len(tokenizer) == model.get_input_embeddings().num_embeddings
    assert config.pad_token_id == tokenizer.pad_token_id
    assert config.eos_token_id == tokenizer.eos_token_id
    if labels:
        assert [config.id2label[i] for i in range(3)] == labels
        assert config.label2id == {name: i for i, name in enumerate(labels)}
    if config.is_encoder_decoder:
        generation = transformers.GenerationConfig.from_pretrained(folder)
        start = tokenizer.eos_token_id if family == "bart" else tokenizer.pad_token_id
        assert config.decoder_start_token_id == generation.decoder_start_token_id == start
        forced = None if family == "t5" else tokenizer.eos_token_id
        assert generation.forced_eos_token_id == forced
    inputs = tokenizer("a man", return_tensors="pt")
    with torch.inference_mode():
        if model.can_generate():
            tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
            assert int(tokens.max()) < len(tokenizer)
        else:
            assert model(**inputs).logits.shape == (1, 3)


def test_weights_equal_seeded_transformers_initialization(tmp_path):
    folder, _ = make_untrained(tmp_path / "a", "bert", labels=["a", "b"])
    model, _ = load_model(folder)
    transformers.set_seed(3)
    reference = transformers.BertForSequenceClassification(model.config)
    for (name, parameter), reference_parameter in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        assert torch.equal(parameter, reference_parameter), name
    other, _ = make_untrained(tmp_path / "b", "bert", labels=["a", "b"], seed=4)
    assert not torch.equal(load_model(other)[0].classifier.weight, model.classifier.weight)


def test_shortlist_of_tokenizer_folder_is_not_copied(tmp_path):
    folder = tiny.write_marian(tmp_path / "m")
    values = transformers.MarianConfig.from_pretrained(folder).to_dict()
    words = values["vocab_size"]
    write_shortlist(make_shortlist(np.zeros((words, 2)), np.array([0, 1]), words), folder)
    (tmp_path / "new").mkdir()
    create_model(values, folder, tmp_path / "new", task="translation", seed=3)
    assert not (tmp_path / "new" / SHORTLIST).exists()


def test_config_values_changed_for_tokenizer_are_reported(tmp_path):
    folder = tiny.write_marian(tmp_path / "m")
    tokenizer = load_tokenizer(folder)
    values = {"model_type": "marian", "vocab_size": 10, "pad_token_id": 3, "decoder_vocab_size": 10}
    agreed = config_for_tokenizer(values, tokenizer, "translation", exact=False)
    assert agreed == {
        "vocab_size": len(tokenizer),
        "decoder_vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": 0,
        "bos_token_id": None,
        "decoder_start_token_id": tokenizer.pad_token_id,
        "forced_eos_token_id": 0,
    }
    padded = config_for_tokenizer(values | {"vocab_size": 4096}, tokenizer, "translation", exact=False)
    assert padded["vocab_size"] == 4096
    (tmp_path / "out").mkdir()
    config = values | CONFIGS["marian"][1]
    notes = create_model(config, folder, tmp_path / "out", task="translation", seed=0)
    assert set(message_codes(notes)) == {"config-changed"}
    [note] = (note for note in notes if "pad_token_id" in note.message)
    assert re.findall(r"\d+", note.message) == [str(tokenizer.pad_token_id), "3"]


def test_tokenizer_without_required_special_token_is_rejected(tmp_path):
    tokenizer = load_tokenizer(tiny.write_bert(tmp_path / "b"))
    assert (
        config_for_tokenizer({"model_type": "bert"}, tokenizer, "text-classification", False)["pad_token_id"]
        == 0
    )
    with raises_code("missing-special-token", InputError) as caught:
        config_for_tokenizer({"model_type": "bart"}, tokenizer, "translation", False)
    assert all(part in str(caught.value) for part in (" eos ", " bart ", "translation"))


def test_invalid_config_is_rejected(tmp_path):
    (tmp_path / "m").mkdir()
    folder = tiny.write_bert(tmp_path / "b")
    values = {"model_type": "bert", **ENCODER, "num_attention_heads": 3}
    with raises_code("wrong-config", InputError) as caught:
        create_model(values, folder, tmp_path / "m", task="text-classification", seed=0)
    assert caught.value.setting == "model.config"
