"""Text pairs, token types and length limits of the classifiers, against transformers' own pipeline."""

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from smelt.data.splits import Example
from smelt.models.checkpoint import load_tokenizer
from smelt.models.text_rules import max_input_length, position_limit
from smelt.models.tokenizer import encode_texts
from smelt.runtimes.predict_texts import class_logits
from smelt.runtimes.registry import open_runner
from tests.support.models import classifiers, tiny

pytestmark = pytest.mark.quick

FIRST, SECOND = tiny.SENTENCES[:5], tiny.SENTENCES[5:]


@pytest.fixture(scope="module", params=classifiers.MAKERS)
def folder(request, tmp_path_factory):
    return classifiers.MAKERS[request.param](tmp_path_factory.mktemp(request.param) / "m", labels=3)


def logits_of(folder, examples, batch_size=3):
    with open_runner(tiny.as_artifact(folder, "text-classification")) as runner:
        return class_logits(runner, examples, batch_size)


@pytest.mark.parametrize("pairs", [True, False])
def test_logits_equal_the_pipeline(folder, pairs):
    """The pipeline works row by row, so padding and batches must not matter either."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    reference = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))
    rows = [{"text": a, "text_pair": b} if pairs else {"text": a} for a, b in zip(FIRST, SECOND, strict=True)]
    scores = [
        {entry["label"]: entry["score"] for entry in reference(row, top_k=None, function_to_apply="none")}
        for row in rows
    ]
    expected = [[row[f"LABEL_{i}"] for i in range(3)] for row in scores]
    examples = [Example(r["text"], text_pair=r.get("text_pair")) for r in rows]
    assert np.allclose(logits_of(folder, examples), expected, atol=1e-5)
    assert np.ptp(expected, axis=0).min() > 0.01  # the rows differ, so a mix-up would show


def test_rows_with_and_without_a_second_text_may_be_mixed(folder):
    pair, alone = Example(FIRST[0], text_pair=SECOND[0]), Example(FIRST[1])
    together = logits_of(folder, [pair, alone, pair])
    assert np.allclose(together[[0]], logits_of(folder, [pair]), atol=1e-5)
    assert np.allclose(together[[1]], logits_of(folder, [alone]), atol=1e-5)
    tokenizer = load_tokenizer(folder)
    ids = encode_texts([pair.text, alone.text], tokenizer, 64, [pair.text_pair, None]).ids
    assert ids == [tokenizer(pair.text, pair.text_pair)["input_ids"], tokenizer(alone.text)["input_ids"]]


def test_text_at_the_limit_runs_and_a_longer_one_is_truncated(folder, tmp_path):
    """RoBERTa's table has two rows more than it has places for tokens; the limit is where it ends."""
    tokenizer = load_tokenizer(folder)
    tokenizer.model_max_length = 10**9  # so that only the position table limits
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    config = model.config.to_dict()
    limit = max_input_length(tokenizer, config)
    assert limit == position_limit(config) == (64 if config["model_type"] == "roberta" else 32)
    encoded = encode_texts([" ".join(tiny.SENTENCES * 3)], tokenizer, limit)
    assert encoded.truncated == 1
    assert len(encoded.ids[0]) == limit
    import torch

    ids = torch.tensor(encoded.ids)
    assert torch.isfinite(model(ids).logits).all()
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.cat([ids, ids[:, 1:2]], dim=1))


def test_truncated_pairs_lose_tokens_of_the_longer_text_as_in_transformers(folder):
    tokenizer = load_tokenizer(folder)
    long, short = " ".join(tiny.SENTENCES), "a man"
    expected = tokenizer(long, short, truncation=True, max_length=20)["input_ids"]
    assert encode_texts([long], tokenizer, 20, [short]).ids == [expected]


def test_token_types_are_omitted_if_the_model_has_none(tmp_path):
    """Many DistilBERT checkpoints come with BERT's tokenizer, which gives them."""
    folder = classifiers.distilbert(tmp_path / "m", labels=3)
    examples = [Example(a, text_pair=b) for a, b in zip(FIRST, SECOND, strict=True)]
    expected = logits_of(folder, examples)
    file = folder / "tokenizer_config.json"
    file.write_text(file.read_text().replace("DistilBertTokenizer", "BertTokenizer"))
    assert "token_type_ids" in load_tokenizer(folder)("a man")
    assert np.array_equal(logits_of(folder, examples), expected)


def test_sinusoidal_position_table_is_loaded_unchanged(tmp_path):
    folder = classifiers.distilbert(tmp_path / "m", sinusoidal_pos_embds=True)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = model(**tokenizer(FIRST[0], return_tensors="pt")).logits.detach().numpy()
    assert np.allclose(logits_of(folder, [Example(FIRST[0])]), expected, atol=1e-5)


def test_unused_pooler_of_roberta_classifiers_is_ignored(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    folder = classifiers.roberta(tmp_path / "m")
    expected = logits_of(folder, [Example(FIRST[0])])
    tensors = load_file(folder / "model.safetensors") | {
        "roberta.pooler.dense.weight": torch.ones(32, 32),
        "roberta.pooler.dense.bias": torch.ones(32),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # where a tensor lies in the file may change the last digit
    assert np.allclose(logits_of(folder, [Example(FIRST[0])]), expected, rtol=0, atol=1e-6)
