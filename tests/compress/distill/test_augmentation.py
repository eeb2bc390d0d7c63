"""Copies of texts with replaced words, as TinyBERT's data augmentation makes them."""

import random
import re
from collections import Counter

import pytest
import torch
import transformers
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from smelt.compress.distill.augmentation import (
    AugmentationSettings,
    CandidateFinder,
    WordSpan,
    WordVectors,
    augment_training_samples,
    replace_words,
)
from smelt.compress.distill.settings import DistillSettings
from smelt.compress.distill.stage import Distill
from smelt.data.splits import Example, Split
from smelt.stage import Context
from tests.support.expected_errors import raises_code
from tests.support.models import masked, tiny

TEXT = "a man, Walks a dog"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return masked.write_model(tmp_path_factory.mktemp("m") / "m")


def test_candidates_are_likeliest_tokens_with_the_original_as_second_text(folder):
    """data_augmentation.py: [CLS] masked text [SEP] text [SEP], token types 0 and 1, M likeliest tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    pieces = tokenizer.tokenize(TEXT)
    second = pieces.index("man")
    rows = ["[CLS]", *pieces, "[SEP]", *pieces, "[SEP]"]
    rows[1 + second] = "[MASK]"
    types = [0] * (len(pieces) + 2) + [1] * (len(pieces) + 1)
    with torch.no_grad():
        ids = torch.tensor([tokenizer.convert_tokens_to_ids(rows)])
        logits = model(ids, token_type_ids=torch.tensor([types])).logits[0, 1 + second]
    expected = tokenizer.convert_ids_to_tokens(logits.argsort(descending=True)[:4].tolist())
    expected = [t for t in expected if not t.startswith("##") and t not in tokenizer.all_special_tokens]
    candidates = CandidateFinder(AugmentationSettings(model=str(folder), top_k=4)).candidates(TEXT)
    assert candidates.get(WordSpan(2, 5), []) == expected


def test_stop_words_and_words_of_several_tokens_are_kept(tmp_path):
    folder = masked.write_model(tmp_path / "m", "electra")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = sorted({*" ".join(tiny.SENTENCES).split(), "zebrawalks"})
    words = set(texts) - ENGLISH_STOP_WORDS
    single = {text for text in words if len(tokenizer.tokenize(text)) == 1}
    assert single != words
    (tmp_path / "vectors.txt").write_text("zebrawalks 1 0\nstrolls 0.9 0.1\n")
    for vectors, others in ((None, set()), (str(tmp_path / "vectors.txt"), {"zebrawalks"})):
        settings = AugmentationSettings(model=str(folder), top_k=100, vectors=vectors)
        finder = CandidateFinder(settings)
        replaced = {text[slice(*span)] for text in texts for span in finder.candidates(text)}
        assert replaced == single | others


def test_word_of_several_tokens_gets_nearest_vectors(folder, tmp_path):
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("manwalks 1 0\nstrolls 0.9 0.1\nruns 0.5 0.5\nstone -1 0\n")
    assert WordVectors(vectors).neighbors("manwalks", 2) == ["strolls", "runs"]
    assert WordVectors(vectors).neighbors("unknown", 2) == []
    vectors.write_text("manwalks 1 0\nstrolls 0.9\n")
    with raises_code("damaged-file"):
        WordVectors(vectors)


def test_each_word_is_replaced_with_the_probability():
    candidates = {WordSpan(0, 1): ["x", "y"], WordSpan(2, 3): ["z"]}
    counts: Counter[str] = Counter()
    for seed in range(4000):
        [*copies] = replace_words("a b!", candidates, 1, 0.4, random.Random(seed))
        counts[copies[0] if copies else "a b!"] += 1
    expected = {"a b!": 0.36, "x b!": 0.12, "y b!": 0.12, "a z!": 0.24, "x z!": 0.08, "y z!": 0.08}
    assert counts.keys() == expected.keys()
    for text, share in expected.items():
        assert counts[text] / 4000 == pytest.approx(share, abs=0.04)


def test_copies_are_different_and_follow_the_seed(folder, tmp_path):
    examples = tuple(Example(s, label="yes") for s in tiny.SENTENCES[:3])
    split = Split("train", (*examples, Example("a man", text_pair="a dog", label="no")))
    settings = AugmentationSettings(model=str(folder), copies=6, probability=0.7)

    def augmented(seed: int) -> Context:
        ctx = Context(
            out=tmp_path, task="text-classification", data={"train": split}, seed=seed, ancestors={},
            score=lambda: {},
        )  # fmt: skip
        return augment_training_samples(settings, ctx)

    ctx = augmented(0)
    rows = [(e.text, e.text_pair, e.label) for e in ctx.data["train"].examples]
    assert len(rows) == len(set(rows)) == len(split) + ctx.details["augmentation"]["copies"]
    assert len(rows) > len(split) + 6
    assert set(split.examples) <= set(ctx.data["train"].examples)
    for text, pair, label in rows:
        assert label == ("no" if pair else "yes")
        assert pair is None or text == "a man" or pair == "a dog"
        assert not re.search(r"##|\[", text)
    assert ctx.data["train"] == augmented(0).data["train"] != augmented(1).data["train"]


def test_classifier_is_no_source_of_words(tmp_path):
    classifier = tiny.write_bert(tmp_path / "m")
    settings = AugmentationSettings(model=str(classifier))
    with raises_code("different-kind"):
        CandidateFinder(settings)
    (error,) = Distill.check_rows(DistillSettings(augmentation=settings), "text-classification", {})
    assert (error.code, error.setting) == ("different-kind", "augmentation.model")


def test_vectors_of_different_lengths_name_the_line(tmp_path):
    (tmp_path / "vectors.txt").write_text("man 1 0\nwoman 1 0\nboy 1\n")
    with raises_code("damaged-file") as caught:
        WordVectors(tmp_path / "vectors.txt")
    assert caught.value.line == 3
