"""An exported tokenizer gives what transformers gives, or transformers stays."""

import gzip
import itertools
import json
import shutil
from pathlib import Path

import pytest

from smelt.data.splits import Example, Split
from smelt.export import tokenizer as code
from smelt.export.tokenizer import (
    EDGE_CASE_TEXTS,
    TokenizerSample,
    compare_tokenizers,
    export_tokenizer,
    make_tokenizer_sample,
    read_tokenizer_facts,
)
from smelt.models.checkpoint import copy_tokenizer, load_tokenizer
from smelt.models.text_rules import NO_LIMIT
from smelt.models.tokenizer import RustTokenizer, open_tokenizer, read_tokenizer_info
from tests.support.models import causal, classifiers, published_tokenizers, seq2seq, tiny

pytestmark = pytest.mark.quick

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
PLAIN = [*tiny.SENTENCES, *(line for line in causal.TEXT.splitlines() if line)]
TEXTS = [*PLAIN, *(text for text in EDGE_CASE_TEXTS if len(text) < 100)]
TINY = {
    "marian": tiny.write_marian, "bert": tiny.write_bert, "distilbert": classifiers.distilbert,
    "roberta": classifiers.roberta, "t5": seq2seq.write_t5, "bart": seq2seq.write_bart,
    "mbart": lambda folder: seq2seq.write_bart(folder, kind="mbart"),
    **{name: lambda folder, name=name: causal.write_model(folder, name) for name in causal.FAMILIES},
}  # fmt: skip


def made(folder, name, texts=PLAIN * 4, size=90):
    folder.mkdir()
    return published_tokenizers.MAKERS[name](folder, texts, size)


def copied(src, out):
    """Do what the onnx stage does before it exports the tokenizer."""
    out.mkdir()
    shutil.copyfile(src / "config.json", out / "config.json")
    copy_tokenizer(src, out)
    return out


def rows(texts):
    return {"validation": Split("v", tuple(Example(text, (text[::-1],)) for text in texts))}


@pytest.mark.parametrize("name", [*published_tokenizers.MAKERS, *(f"tiny {name}" for name in TINY)])
def test_every_family_is_tokenized_without_transformers(name, tmp_path):
    kind = name.removeprefix("tiny ")
    src = made(tmp_path / "src", name) if kind == name else TINY[kind](tmp_path / "src")
    hub = load_tokenizer(src)
    out = copied(src, tmp_path / "out")
    details = export_tokenizer(hub, src, out, rows(TEXTS))
    assert (details.reader, details.reason) == ("sentencepiece" if kind == "marian" else "tokenizers", "")
    assert read_tokenizer_info(out) == details
    light = open_tokenizer(out)
    assert light.reader == details.reader
    assert light.encode_batch(TEXTS, NO_LIMIT).ids == hub(TEXTS, verbose=False)["input_ids"]
    # other tools read the same files
    reloaded = load_tokenizer(out)
    assert reloaded(TEXTS, verbose=False)["input_ids"] == hub(TEXTS, verbose=False)["input_ids"]


def _real_texts(count):
    """Return rows of every data set with text, long and short, English and German."""
    data_columns = [("multi30k_en_de", "source"), ("tatoeba_en_de", "target"), ("dialogsum", "dialogue"),
              ("banking77", "text"), ("sst2", "text"), ("scitldr", "source")]  # fmt: skip
    texts = []
    for name, column in data_columns:
        with gzip.open(DATA / name / "test.jsonl.gz", "rt", encoding="utf-8") as stream:
            json_rows = [json.loads(line) for line in itertools.islice(stream, count)]
        texts += [
            str(row.get(column) or next(v for v in row.values() if isinstance(v, str))) for row in json_rows
        ]
    with gzip.open(DATA / "wikitext2" / "test.txt.gz", "rt", encoding="utf-8") as stream:
        texts += [line for line in itertools.islice(stream, 2 * count) if line.strip()]
    return texts


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the real texts of {DATA} are not here")
@pytest.mark.parametrize("name", published_tokenizers.MAKERS)
def test_real_texts_are_tokenized_like_transformers(name, tmp_path):
    full_texts = _real_texts(120)
    texts = [text[:200] for text in full_texts] + full_texts[::50]
    src = made(tmp_path / "src", name, texts, 2000)
    hub, out = load_tokenizer(src), copied(src, tmp_path / "out")
    details = export_tokenizer(hub, src, out, {})
    assert details.reader != "transformers"
    pairs = list(itertools.pairwise(text[:60] for text in full_texts))
    sample = TokenizerSample(texts, pairs, make_tokenizer_sample(hub, {}).rows)
    assert compare_tokenizers(hub, out, details, sample) is None


@pytest.fixture
def differences(monkeypatch):
    """The differences that are found while a tokenizer is exported."""
    differences = []

    def find(*asked):
        differences.append(compare_tokenizers(*asked))
        return differences[-1]

    monkeypatch.setattr(code, "compare_tokenizers", find)
    return differences


@pytest.mark.parametrize(
    ("update", "what"),
    [({"truncation_side": "left"}, "ids"), ({"types": False}, "types"), ({"clean_up": True}, "texts")],
)
def test_differing_tokenizer_falls_back_to_transformers(tmp_path, monkeypatch, differences, update, what):
    src = made(tmp_path / "src", "gpt2" if "clean_up" in update else "bert")
    out = copied(src, tmp_path / "out")
    monkeypatch.setattr(
        code, "read_tokenizer_facts", lambda hub: read_tokenizer_facts(hub).model_copy(update=update)
    )
    details = export_tokenizer(load_tokenizer(src), src, out, rows(TEXTS))
    assert details.reader == "transformers"
    assert [difference.kind for difference in differences] == [what]
    assert details.reason == differences[0].text
    assert details.reason.startswith("tokenizers ")  # not what transformers reads from the new files
    assert not (out / "tokenizer.json").exists()  # as there was none before
    assert open_tokenizer(out).reader == "transformers"


@pytest.mark.parametrize(
    ("spoil", "what"),
    [(lambda rows: rows.ids[3].append(5), "ids"), (lambda rows: rows.types[3].__setitem__(0, 1), "types")],
)
def test_single_differing_sample_is_detected(tmp_path, monkeypatch, differences, spoil, what):
    src = made(tmp_path / "src", "bert")
    out = copied(src, tmp_path / "out")
    original = RustTokenizer.encode_batch

    def spoiled(self, texts, max_length, pairs=None):
        encoded = original(self, texts, max_length, pairs)
        if len(encoded.ids) > 3 and pairs is None:
            spoil(encoded)
        return encoded

    monkeypatch.setattr(RustTokenizer, "encode_batch", spoiled)
    assert export_tokenizer(load_tokenizer(src), src, out, rows(TEXTS)).reader == "transformers"
    assert [difference.kind for difference in differences] == [what]


def test_differing_pairs_are_detected(tmp_path, monkeypatch, differences):
    src = made(tmp_path / "src", "bert")
    out = copied(src, tmp_path / "out")
    original = RustTokenizer.encode_batch
    monkeypatch.setattr(
        RustTokenizer,
        "encode_batch",
        lambda self, texts, most, pairs=None: original(self, pairs or texts, most, texts if pairs else None),
    )
    assert export_tokenizer(load_tokenizer(src), src, out, rows(TEXTS)).reader == "transformers"
    assert [difference.kind for difference in differences] == ["pairs"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("separate_vocabs", True), ("sp_model_kwargs", {"alpha": 0.1}), ("split_special_tokens", True)],
)
def test_unsupported_marian_tokenizer_falls_back_to_transformers(tmp_path, setting, value):
    hub = load_tokenizer(made(tmp_path / "src", "marian"))
    assert read_tokenizer_facts(hub).reader == "sentencepiece"
    setattr(hub, setting, value)
    assert read_tokenizer_facts(hub).reader == "transformers"
    assert setting in read_tokenizer_facts(hub).reason


def test_added_token_with_stripping_falls_back_to_transformers(tmp_path):
    from tokenizers import AddedToken

    hub = load_tokenizer(made(tmp_path / "src", "marian"))
    assert read_tokenizer_facts(hub).reader == "sentencepiece"
    hub.add_tokens([AddedToken("<mark>", lstrip=True)])
    assert read_tokenizer_facts(hub).reader == "transformers"


def test_equal_tokenizer_file_is_not_rewritten(tmp_path):
    src = seq2seq.write_t5(tmp_path / "src")
    file = src / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=7))
    out = copied(src, tmp_path / "out")
    export_tokenizer(load_tokenizer(src), src, out, {})
    assert (out / "tokenizer.json").read_bytes() == file.read_bytes()


def test_truncation_and_padding_state_is_not_saved(tmp_path):
    src = made(tmp_path / "src", "bert")
    out = copied(src, tmp_path / "out")
    hub = load_tokenizer(src)
    hub(PLAIN, truncation=True, max_length=5, padding=True)
    export_tokenizer(hub, src, out, {})
    content = json.loads((out / "tokenizer.json").read_text())
    assert (content["truncation"], content["padding"]) == (None, None)


def test_language_tokens_are_saved(tmp_path):
    src = made(tmp_path / "src", "mbart50")
    out = copied(src, tmp_path / "out")
    hub = load_tokenizer(src)
    export_tokenizer(hub, src, out, {})
    (ids,) = open_tokenizer(out).encode_batch(["a man"], NO_LIMIT).ids
    assert ids[0] == hub.lang_code_to_id["de_DE"]
