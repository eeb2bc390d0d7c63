"""Marian's tokenizer as a tokenizer.json: the same ids and texts, or none."""

import json
import shutil

import pytest

from smelt.core.errors import InputError
from smelt.export.package import transformers_js
from smelt.models.text_rules import NO_LIMIT
from smelt.models.tokenizer import MarianTokenizer, RustTokenizer, read_tokenizer_info, write_tokenizer_info
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.models import tiny


@pytest.fixture
def source(tmp_path):
    return shutil.copytree(exported_artifacts.exported_artifact("translator"), tmp_path / "source")


def with_word(source, token):
    """Give `source` one word more, which is not of its SentencePiece model."""
    vocabulary = json.loads((source / "vocab.json").read_text())
    token_id = len(vocabulary)
    (source / "vocab.json").write_text(json.dumps(vocabulary | {token: token_id}))
    return token_id


def ids(reader, text):
    return reader.encode_batch([text], NO_LIMIT).ids[0]


def both(source, folder):
    details = read_tokenizer_info(source)
    return MarianTokenizer(source, details), RustTokenizer(folder, details)


def test_ids_and_texts_equal_marian_tokenizer(source, tmp_path):
    transformers_js.write_marian_tokenizer_json(source, tmp_path)
    marian, converted = both(source, tmp_path)
    for text in [*tiny.SENTENCES, "", "  two   dogs ", "unknown \u6f22\u5b57!", "a</s>b", "\ufb01ve"]:
        assert ids(converted, text) == ids(marian, text)
        assert converted.decode_batch([ids(marian, text)]) == marian.decode_batch([ids(marian, text)])
    assert len(transformers_js.comparison_texts(source, read_tokenizer_info(source))) > 9_900


def test_target_only_token_is_decoded_but_not_encoded(source, tmp_path):
    with_word(source, "\u00e4")  # SentencePiece has each letter of its pieces as a piece
    token_id = with_word(source, "\u2581dogs\u00e4")
    transformers_js.write_marian_tokenizer_json(source, tmp_path)
    marian, converted = both(source, tmp_path)
    assert ids(converted, "two dogs") == ids(marian, "two dogs")
    assert converted.decode_batch([[token_id]]) == marian.decode_batch([[token_id]]) == ["dogs\u00e4"]


def test_target_only_character_keeps_its_id(source, tmp_path):
    token_id = with_word(source, "\u00e4")
    transformers_js.write_marian_tokenizer_json(source, tmp_path)
    marian, converted = both(source, tmp_path)
    assert token_id in ids(converted, "two \u00e4 dogs")
    assert ids(converted, "two \u00e4 dogs") == ids(marian, "two \u00e4 dogs")


@pytest.mark.parametrize(
    "words", [["\u00e4"], ["\u00e4", "\u2581dogs\u00e4"], ["\u00e4", "s\u00e4", "og", "\u00f6"]]
)
def test_target_only_tokens_are_split_like_sentencepiece(words, source, tmp_path):
    """SentencePiece itself is asked; a piece of the target is never taken where it knows the letters."""
    import sentencepiece

    for token in words:
        with_word(source, token)
    transformers_js.write_marian_tokenizer_json(source, tmp_path)
    vocabulary, unknown_id = (
        json.loads((source / "vocab.json").read_text()),
        read_tokenizer_info(source).unknown,
    )
    reader = sentencepiece.SentencePieceProcessor(model_file=str(source / "source.spm"))
    converted = both(source, tmp_path)[1]
    for text in (
        "two dogs\u00e4 run",
        "\u00e4",
        "dogs\u00e4",
        "a\u00e4s\u00e4s dogs",
        "\u00f6 s\u00f6 \u6f22",
        "dogs",
    ):
        subwords = reader.encode(text, out_type=str)
        assert ids(converted, text)[:-1] == [vocabulary.get(subword, unknown_id) for subword in subwords], (
            text,
            subwords,
        )


def test_language_tokens_are_not_split(source, tmp_path):
    token_id = with_word(source, ">>deu<<")
    transformers_js.write_marian_tokenizer_json(source, tmp_path)
    marian, converted = both(source, tmp_path)
    assert ids(converted, ">>deu<< two dogs") == ids(marian, ">>deu<< two dogs")
    assert ids(converted, ">>deu<< two dogs")[0] == token_id


def test_different_tokenization_is_rejected_without_output(source, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers_js, "_added_token_score", lambda text: 0.0)
    with_word(source, "\u2581t\u2581")
    with_word(source, "og")
    with raises_code("tokenizer-differs", InputError) as excinfo:
        transformers_js.write_marian_tokenizer_json(source, tmp_path)
    assert excinfo.value.file == str(source / "source.spm")
    assert not (tmp_path / "tokenizer.json").exists()


def test_vocabulary_with_id_gaps_is_rejected(source, tmp_path):
    vocabulary = json.loads((source / "vocab.json").read_text())
    (source / "vocab.json").write_text(json.dumps(vocabulary | {"far": 10_000}))
    with raises_code("vocabulary-gaps", InputError):
        transformers_js.write_marian_tokenizer_json(source, tmp_path)


def test_non_unigram_model_is_rejected(source, tmp_path):
    import sentencepiece

    (tmp_path / "text.txt").write_text("\n".join(tiny.SENTENCES * 4))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "bpe"), vocab_size=60, model_type="bpe",
        minloglevel=2,
    )  # fmt: skip
    shutil.copyfile(tmp_path / "bpe.model", source / "source.spm")
    with raises_code("unsupported-tokenizer", InputError):
        transformers_js.write_marian_tokenizer_json(source, tmp_path)
    (source / "source.spm").write_bytes(b"\xff\xff")
    with raises_code("damaged-file", InputError):
        transformers_js.write_marian_tokenizer_json(source, tmp_path)


def test_custom_eos_token_is_kept(source, tmp_path):
    details = read_tokenizer_info(source)
    write_tokenizer_info(source, details.model_copy(update={"eos": details.pad}))
    transformers_js.write_marian_tokenizer_json(source, tmp_path)
    assert ids(both(source, tmp_path)[1], "two dogs")[-1] == details.pad
