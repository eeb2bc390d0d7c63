"""Entities equal those of transformers' pipeline."""

import numpy as np
import pytest
import torch
import transformers

from smelt.data.splits import Example
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.generation.backend import Batch
from smelt.runtimes.registry import open_folder
from smelt.runtimes.tag_words import find_entities, tag_words
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import taggers, tiny
from tests.support.models.every_family import DISTINCT_FAMILIES

TEXTS = [*tiny.SENTENCES, "the dogs, two cats; a man.", "sun river grass sun  river", "dogs"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


def pipeline_entities(folder, texts, **options):
    pipe = transformers.pipeline("token-classification", str(folder), aggregation_strategy="first", **options)
    return [
        [(e["entity_group"], pytest.approx(float(e["score"]), abs=1e-5), e["start"], e["end"]) for e in row]
        for row in map(pipe, texts)
    ]


def as_tuples(results):
    return [[(e.entity_group, e.score, e.start, e.end) for e in row] for row in results]


@pytest.mark.parametrize("family", ["bert", "distilbert", "electra"])
def test_entities_of_texts_equal_pipeline(home, family):
    folder = taggers.write_model(home / family, family)
    expected = pipeline_entities(folder, TEXTS)
    assert sum(map(len, expected)) > 20
    with open_folder(folder, "torch") as runner:
        results = find_entities(runner, [Example(text) for text in TEXTS], batch_size=4)
    assert as_tuples(results) == expected
    assert all(e.word == t[e.start : e.end] for t, row in zip(TEXTS, results, strict=True) for e in row)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_tags_of_split_words_come_from_first_tokens(home, family):
    folder = taggers.write_model(home / family, family)
    words = [text.split() for text in TEXTS]
    spaced = {"add_prefix_space": True} if family == "roberta" else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **spaced)
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).requires_grad_(False)
    with open_folder(folder, "torch") as runner:
        results = tag_words(runner, [Example(" ".join(w), words=tuple(w)) for w in words])
    for text_words, tagged in zip(words, results, strict=True):
        encoded = tokenizer(text_words, is_split_into_words=True, return_tensors="pt")
        probabilities = model(**encoded).logits[0].softmax(-1).max(-1)
        first = [encoded.word_ids().index(i) for i in range(len(text_words))]
        assert tagged.tags == [model.config.id2label[int(probabilities.indices[i])] for i in first]
        assert tagged.scores == pytest.approx([float(probabilities.values[i]) for i in first], abs=1e-5)


def test_onnx_entities_equal_torch(home):
    folder = taggers.write_model(home / "bert")
    out = home / "onnx"
    out.mkdir()
    harness.run_stage(Onnx(), OnnxSettings(target="ort-cpu"), folder, out, taggers.TASK)
    examples = [Example(text) for text in TEXTS]
    with open_folder(folder, "torch") as torch_runner, open_folder(out, "onnx", "ort-cpu") as onnx_runner:
        assert onnx_runner.text.tokenizer.reader == "tokenizers"
        expected, results = (find_entities(runner, examples, 4) for runner in (torch_runner, onnx_runner))
    assert [[e._replace(score=pytest.approx(e.score, abs=1e-5)) for e in row] for row in expected] == results


@pytest.mark.parametrize("family", [name for name in taggers.FAMILIES if name in DISTINCT_FAMILIES])
def test_onnx_logits_equal_transformers(home, family):
    folder = taggers.write_model(home / family, family)
    out = home / f"{family}-onnx"
    out.mkdir()
    harness.run_stage(Onnx(), OnnxSettings(target="ort-cpu"), folder, out, taggers.TASK)
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    ids = torch.randint(5, model.config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < torch.tensor([[9], [6], [2]])).long()
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits.numpy()
    with open_folder(out, "onnx", "ort-cpu") as runner:
        logits = runner.forward(Batch(ids.numpy(), mask.numpy()))
    is_token = mask.numpy() == 1
    assert logits.shape == expected.shape == (3, 9, len(taggers.TAGS))
    assert np.allclose(logits[is_token], expected[is_token], atol=1e-4)


def test_truncated_words_and_texts_without_words_have_no_entity(home):
    folder = taggers.write_model(home / "bert")
    cuts = []
    long_text = " ".join(["dogs"] * 200)
    with open_folder(folder, "torch") as runner:
        limit = runner.text.max_input_length
        tagged = tag_words(
            runner,
            [Example(long_text), Example(""), Example("\x00")],
            on_truncate=lambda *cut: cuts.append(cut),
        )
        assert find_entities(runner, [Example(" ")]) == [[]]
        with raises_code("empty-data"):
            tag_words(runner, [])
    assert cuts == [(1, limit)]
    assert np.count_nonzero(tagged[0].scores) == limit - 2
    assert set(tagged[0].tags[limit - 2 :]) == {"O"}
    assert tagged[1] == ([], [])


def test_non_finite_logits_are_refused(home):
    folder = taggers.write_model(home / "bert")
    with open_folder(folder, "torch") as runner:
        torch.nn.init.constant_(runner.backend.model.classifier.bias, float("nan"))
        with raises_code("non-finite-outputs"):
            find_entities(runner, [Example("dogs")])
