"""A bare BART becomes a model that generates, as transformers makes one of it."""

import shutil

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, BartModel

from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model
from smelt.models.import_model import import_model
from tests.support.expected_errors import raises_code
from tests.support.models import seq2seq


@pytest.fixture
def bare(tmp_path):
    full_folder = seq2seq.write_bart(tmp_path / "whole")
    shutil.copytree(full_folder, tmp_path / "bare")
    BartModel.from_pretrained(full_folder, local_files_only=True).save_pretrained(tmp_path / "bare")
    return tmp_path / "bare"


def test_bare_checkpoint_gets_tied_output_layer(bare, tmp_path):
    (tmp_path / "out").mkdir()
    assert message_codes(import_model(bare, tmp_path / "out")) == ["tied-output-head"]
    model, _ = load_model(tmp_path / "out")
    reference = AutoModelForSeq2SeqLM.from_pretrained(bare, local_files_only=True)
    ids = torch.arange(4, 16).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=ids, decoder_input_ids=ids).logits,
            reference(input_ids=ids, decoder_input_ids=ids).logits,
        )
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_missing_untied_output_layer_is_rejected(bare, tmp_path):
    config = bare / "config.json"
    config.write_text(
        config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    (tmp_path / "out").mkdir()
    with raises_code("missing-output-layer", InputError):
        import_model(bare, tmp_path / "out")
