"""Tokenizer files that old and new transformers open: words of the config, and the same ids."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from smelt.core.errors import InputError
from smelt.export.package.hub_files import (
    copy_tokenizer_files,
    portable_tokenizer_config,
    preprocessing_notes,
    with_prefix,
)
from smelt.models.checkpoint import load_tokenizer
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.models import tiny

KINDS = ("translator", "t5", "classifier", "writer", "embedder", "roberta")
TEXTS = [*tiny.SENTENCES, "", "UPPER  case?", "</s> a [SEP] b", "caf\u00e9 \u4f60\u597d"]


def written(kind, folder):
    folder.mkdir()
    copy_tokenizer_files(exported_artifacts.exported_artifact(kind), folder)
    return json.loads((folder / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_copied_tokenizer_gives_equal_ids_and_texts(kind, tmp_path):
    content = written(kind, tmp_path / "out")
    assert content["tokenizer_class"] in ("PreTrainedTokenizerFast", "MarianTokenizer")
    assert "backend" not in content
    source, copy_tokenizer = (
        load_tokenizer(exported_artifacts.exported_artifact(kind)),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    assert copy_tokenizer.model_max_length <= source.model_max_length
    limit = {"truncation": True, "max_length": copy_tokenizer.model_max_length}
    expected, encoded = source(TEXTS, **limit), copy_tokenizer(TEXTS, **limit)
    assert encoded["input_ids"] == expected["input_ids"]
    if "token_type_ids" in expected:
        assert encoded["token_type_ids"] == expected["token_type_ids"]
    for skip in (True, False):
        texts = [
            tokenizer.batch_decode(expected["input_ids"], skip_special_tokens=skip)
            for tokenizer in (source, copy_tokenizer)
        ]
        assert texts[0] == texts[1]


def test_prompts_are_left_padded_with_existing_token(tmp_path):
    content = written("writer", tmp_path / "out")
    assert (content["padding_side"], content["pad_token"]) == ("left", content["eos_token"])
    copy_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert copy_tokenizer(["a", "a a a a"], padding=True)["attention_mask"][0][0] == 0


def test_transformers_5_config_is_converted_for_transformers_4():
    options = {"backend": "tokenizers", "extra_special_tokens": ["<a>", "<b>"], "pad_token": "<pad>"}
    assert portable_tokenizer_config(options) == {
        "pad_token": "<pad>",
        "additional_special_tokens": ["<a>", "<b>"],
    }
    assert portable_tokenizer_config({"extra_special_tokens": []}) == {}
    assert portable_tokenizer_config({"extra_special_tokens": {"image": "<i>"}}) == {
        "extra_special_tokens": {"image": "<i>"}
    }


def test_preprocessing_is_reported_in_notes(tmp_path):
    (tmp_path / "text.json").write_text('{"prefix": "translate: ", "lower": true}')
    assert with_prefix(tmp_path, "A Text") == "translate: a text"
    lower, prefix = preprocessing_notes(tmp_path)
    assert "lower case" in lower
    assert "'translate: '" in prefix
    assert preprocessing_notes(exported_artifacts.exported_artifact("translator")) == ()


def test_tokenizer_without_config_is_rejected(tmp_path):
    source = shutil.copytree(exported_artifacts.exported_artifact("classifier"), tmp_path / "source")
    (source / "tokenizer_config.json").unlink()
    (tmp_path / "out").mkdir()
    with raises_code("missing-file", InputError) as excinfo:
        copy_tokenizer_files(source, tmp_path / "out")
    assert excinfo.value.file == str(source / "tokenizer_config.json")
