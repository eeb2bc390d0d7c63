"""An embedder's folder is opened as one, and asks for vectors."""

import numpy as np
import sentences
from refusals import refused

from smelt.core.errors import InputError
from smelt.runtime.backends.open_runner import open_folder, runner_for
from smelt.runtime.batch import Batch
from smelt.runtime.classifier import Classifier
from smelt.runtime.embedder import Embedder

CLASSIFIER = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}


def test_a_folder_that_says_how_it_makes_vectors_is_an_embedders():
    assert runner_for({"model_type": "bert", "architectures": ["BertModel"]}, embeds=True) is Embedder
    assert runner_for({"model_type": "bert", "architectures": ["BertModel"]}) is Classifier
    assert runner_for(CLASSIFIER, embeds=True) is Classifier


def test_token_types_of_a_batch_change_no_vector(tmp_path):
    ids = np.array([[2, 7, 9, 3]])
    with open_folder(sentences.embedder(tmp_path / "m"), "torch", None, 1) as runner:
        assert isinstance(runner, Embedder)
        plain = runner.forward(Batch(ids, np.ones_like(ids)))
        typed = runner.forward(Batch(ids, np.ones_like(ids), np.ones_like(ids)))
        with refused("does-not-generate", InputError):
            runner.encode(Batch(ids, np.ones_like(ids)))
    assert plain.shape == (1, 32)
    assert np.array_equal(plain, typed)
