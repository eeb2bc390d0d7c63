"""Vectors of texts: pooled as sentence-transformers pools, without a trace of padding; files for others."""

import numpy as np
import pytest
import torch
from safetensors import safe_open

from smelt.core.errors import InputError
from smelt.models.checkpoint import load_model, save_model
from smelt.models.model_size import count_parameters
from smelt.models.sentence_model import pool_hidden_states
from smelt.models.text_rules import POOLINGS, SentenceRules, is_sentence_model
from smelt.runtimes.predict_texts import embed_texts
from smelt.runtimes.registry import open_folder
from tests.support.expected_errors import raises_code
from tests.support.models import embedders, tiny

TEXTS = [*tiny.SENTENCES[:3], "she", " ".join(tiny.SENTENCES * 3)]


def vectors(folder, batch_size=8):
    with open_folder(folder, "torch") as runner:
        return embed_texts(runner, TEXTS, batch_size)


@pytest.mark.parametrize("family", embedders.FAMILIES)
def test_padded_batch_vectors_equal_transformers(family, tmp_path):
    folder = embedders.write_embedder(tmp_path / "m", family)
    embeddings = vectors(folder)
    assert embeddings.dtype == np.float32
    assert np.abs(embeddings - embedders.expected_vectors(folder, TEXTS)).max() < 2e-6
    assert np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("normalize", [True, False])
def test_each_pooling_ignores_padding(pooling, normalize, tmp_path):
    folder = embedders.write_embedder(tmp_path / "m", pooling=pooling, normalize=normalize)
    expected = embedders.expected_vectors(folder, TEXTS, pooling, normalize)
    assert np.abs(vectors(folder) - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.quick
@pytest.mark.parametrize("pooling", POOLINGS)
def test_no_mask_pools_as_a_mask_of_ones(pooling):
    hidden = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    rules = SentenceRules(pooling=pooling, normalize=False)
    expected = pool_hidden_states(hidden, torch.ones(2, 5, dtype=torch.int64), rules)
    torch.testing.assert_close(pool_hidden_states(hidden, None, rules), expected)


def test_mean_pooling_of_long_text_is_finite_in_float16():
    """A sum over 8,000 tokens of 20 would be beyond 65504."""
    hidden = torch.full((1, 8000, 4), 20.0, dtype=torch.float16)
    mask = torch.ones(1, 8000, dtype=torch.int64)
    pooled = pool_hidden_states(hidden, mask, SentenceRules(normalize=False))
    assert torch.allclose(pooled.float(), torch.full((1, 4), 20.0), rtol=0.02)


def test_truncation_equals_sentence_transformers(tmp_path):
    folder = embedders.write_embedder(tmp_path / "m", max_length=6)
    with open_folder(folder, "torch") as runner:
        cuts = []
        embed_texts(runner, TEXTS, on_truncate=lambda count, limit: cuts.append((count, limit)))
    assert cuts == [(4, 6)]


def test_saved_embedder_is_a_bare_encoder(tmp_path):
    folder = embedders.write_embedder(tmp_path / "m")
    model, edits = load_model(folder)
    assert is_sentence_model(model)
    out = tmp_path / "out"
    out.mkdir()
    save_model(model, edits, out, folder)
    with safe_open(out / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "encoder.layer.0.attention.self.query.weight" in names
    assert not any("pooler" in name for name in names)
    assert count_parameters(out) == count_parameters(folder)  # the pooler, which nobody reads, is not counted
    assert (
        np.abs(embedders.expected_vectors(out, TEXTS) - embedders.expected_vectors(folder, TEXTS)).max()
        < 1e-6
    )
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()


def test_unused_tensor_of_embedder_is_rejected(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = embedders.write_embedder(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"head.dense.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    with raises_code("unknown-tensor", InputError) as caught:
        load_model(folder)
    assert "head.dense.weight" in str(caught.value)


def test_classifier_with_modules_file_is_loaded_as_classifier(tmp_path):
    """smelt before this task copied modules.json along where a classifier was made of an embedder."""
    folder = tiny.write_bert(tmp_path / "m")
    embedders.write_embedder(tmp_path / "e")
    (folder / "modules.json").write_bytes((tmp_path / "e" / "modules.json").read_bytes())
    assert type(load_model(folder)[0]).__name__ == "BertForSequenceClassification"
