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


def with_word(source, word):
    """Give `source` one word more, which is not of its SentencePiece model."""
    words = json.loads((source / "vocab.json").read_text())
    place = len(words)
    (source / "vocab.json").write_text(json.dumps(words | {word: place}))
    return place


def ids(reader, text):
    return reader.encode_batch([text], NO_LIMIT).ids[0]


def both(source, folder):
    details = read_tokenizer_info(source)
    return MarianTokenizer(source, details), RustTokenizer(folder, details)


def test_ids_and_texts_are_the_models_own(source, tmp_path):
    transformers_js.write_marian_tokenizer_json(source, tmp_path)
    own, made = both(source, tmp_path)
    for text in [*tiny.SENTENCES, "", "  two   dogs ", "unknown \u6f22\u5b57!", "a</s>b", "\ufb01ve"]:
        assert ids(made, text) == ids(own, text)
        assert made.decode_batch([ids(own, text)]) == own.decode_batch([ids(own, text)])
    assert len(transformers_js.comparison_texts(source, read_tokenizer_info(source))) > 9_900


def test_a_word_of_the_target_alone_is_never_read_but_written(source, tmp_path):
    with_word(source, "\u00e4")  # SentencePiece has each letter of its pieces as a piece
    place = with_word(source, "\u2581dogs\u00e4")
    transformers_js.write_marian_tokenizer_json(source, tmp_path)
    own, made = both(source, tmp_path)
    assert ids(made, "two dogs") == ids(own, "two dogs")
    assert made.decode_batch([[place]]) == own.decode_batch([[place]]) == ["dogs\u00e4"]


def test_a_character_of_the_target_alone_has_its_id(source, tmp_path):
    place = with_word(source, "\u00e4")
    transformers_js.write_marian_tokenizer_json(source, tmp_path)
    own, made = both(source, tmp_path)
    assert place in ids(made, "two \u00e4 dogs")
    assert ids(made, "two \u00e4 dogs") == ids(own, "two \u00e4 dogs")


@pytest.mark.parametrize(
    "words", [["\u00e4"], ["\u00e4", "\u2581dogs\u00e4"], ["\u00e4", "s\u00e4", "og", "\u00f6"]]
)
def test_words_of_the_target_alone_are_cut_as_sentencepiece_cuts(words, source, tmp_path):
    """SentencePiece itself is asked; a piece of the target is never taken where it knows the letters."""
    import sentencepiece

    for word in words:
        with_word(source, word)
    transformers_js.write_marian_tokenizer_json(source, tmp_path)
    known, unknown = json.loads((source / "vocab.json").read_text()), read_tokenizer_info(source).unknown
    reader = sentencepiece.SentencePieceProcessor(model_file=str(source / "source.spm"))
    made = both(source, tmp_path)[1]
    for text in (
        "two dogs\u00e4 run",
        "\u00e4",
        "dogs\u00e4",
        "a\u00e4s\u00e4s dogs",
        "\u00f6 s\u00f6 \u6f22",
        "dogs",
    ):
        cut = reader.encode(text, out_type=str)
        assert ids(made, text)[:-1] == [known.get(piece, unknown) for piece in cut], (text, cut)


def test_languages_are_tokens_of_their_own(source, tmp_path):
    place = with_word(source, ">>deu<<")
    transformers_js.write_marian_tokenizer_json(source, tmp_path)
    own, made = both(source, tmp_path)
    assert ids(made, ">>deu<< two dogs") == ids(own, ">>deu<< two dogs")
    assert ids(made, ">>deu<< two dogs")[0] == place


def test_what_reads_otherwise_is_refused_and_leaves_nothing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers_js, "_added_token_score", lambda word: 0.0)
    with_word(source, "\u2581t\u2581")
    with_word(source, "og")
    with raises_code("tokenizer-differs", InputError) as caught:
        transformers_js.write_marian_tokenizer_json(source, tmp_path)
    assert caught.value.file == str(source / "source.spm")
    assert not (tmp_path / "tokenizer.json").exists()


def test_ids_with_gaps_are_refused(source, tmp_path):
    words = json.loads((source / "vocab.json").read_text())
    (source / "vocab.json").write_text(json.dumps(words | {"far": 10_000}))
    with raises_code("vocabulary-gaps", InputError):
        transformers_js.write_marian_tokenizer_json(source, tmp_path)


def test_a_model_that_is_none_of_unigrams_is_refused(source, tmp_path):
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


def test_another_end_of_texts_is_kept(source, tmp_path):
    details = read_tokenizer_info(source)
    write_tokenizer_info(source, details.model_copy(update={"eos": details.pad}))
    transformers_js.write_marian_tokenizer_json(source, tmp_path)
    assert ids(both(source, tmp_path)[1], "two dogs")[-1] == details.pad
