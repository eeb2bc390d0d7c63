"""BERTScore against the numbers of bert-score."""

import json

import pytest

from smelt.core.errors import InputError
from smelt.evaluate.metrics import bertscore
from smelt.evaluate.quality import score_texts
from tests.support.expected_errors import raises_code

TOKENS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "home",
    ".", ",", "##s",
]  # fmt: skip


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("encoder")
    (folder / "vocab.txt").write_text("\n".join(TOKENS))
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(TOKENS), max_position_embeddings=32, **sizes)).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=32).save_pretrained(folder)
    return folder


def test_bertscore_equals_reference_package(encoder, capfd):
    """F1 by bert-score 0.3.13 with num_layers=2, and no idf weights, of the same model."""
    settings = {"bertscore": {"model": encoder.name, "layer": 2}}
    predictions = ["the cat sat.", "a dog ran", "", "the cat sat on a mat , the dogs ran home . " * 9]
    references = [
        ["the cat sat on a mat ."], ["a dog ran home", "the dogs ran"], ["a dog"], ["a dog ran home"],
    ]  # fmt: skip
    score = score_texts(["bertscore"], predictions, references, settings, base=encoder.parent)["bertscore"]
    f1_values = [value for [value] in score.statistics.rows]
    assert f1_values[:3] == pytest.approx([0.8850, 0.9735, 0.0], abs=1e-4)
    assert score.value == pytest.approx(100 * sum(f1_values) / 4)
    assert 0 < f1_values[3] < 1
    [f1_of_equal] = bertscore.bertscore_rows(["a dog"], [["a dog"]], settings["bertscore"], encoder.parent)
    assert f1_of_equal == pytest.approx([1])
    assert capfd.readouterr() == ("", "")  # no progress bar of transformers


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"model": "nowhere", "layer": 1}, "missing-file"), ({"model": ".", "layer": 4}, "wrong-value")],
)
def test_unsupported_encoder_is_rejected(encoder, settings, code):
    with raises_code(code, InputError):
        bertscore.check_encoder(settings, encoder)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "num_hidden_layers": 3}, {"model_type": "t5", "num_hidden_layers": 3},
        {"model_type": "bert", "num_hidden_layers": 3, "is_decoder": True},
    ],
)  # fmt: skip
def test_decoder_is_no_encoder(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    with raises_code("wrong-value", InputError):
        bertscore.check_encoder({"model": ".", "layer": 1}, tmp_path)
