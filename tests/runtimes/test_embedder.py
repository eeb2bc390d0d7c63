"""An embedder's folder is opened as one, and asks for vectors."""

import numpy as np

from smelt.core.errors import InputError
from smelt.generation.backend import Batch
from smelt.runtimes.registry import open_folder, runner_class_for
from smelt.runtimes.single_call_runners import ClassifierRunner, EmbedderRunner
from tests.support.expected_errors import raises_code
from tests.support.models import embedders

CLASSIFIER = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}


def test_folder_with_pooling_settings_is_an_embedder():
    assert (
        runner_class_for({"model_type": "bert", "architectures": ["BertModel"]}, embeds=True)
        is EmbedderRunner
    )
    assert runner_class_for({"model_type": "bert", "architectures": ["BertModel"]}) is ClassifierRunner
    assert runner_class_for(CLASSIFIER, embeds=True) is ClassifierRunner


def test_token_types_of_a_batch_do_not_change_vectors(tmp_path):
    ids = np.array([[2, 7, 9, 3]])
    with open_folder(embedders.write_embedder(tmp_path / "m"), "torch", None, 1) as runner:
        assert isinstance(runner, EmbedderRunner)
        plain = runner.forward(Batch(ids, np.ones_like(ids)))
        typed = runner.forward(Batch(ids, np.ones_like(ids), np.ones_like(ids)))
        with raises_code("does-not-generate", InputError):
            runner.encode(Batch(ids, np.ones_like(ids)))
    assert plain.shape == (1, 32)
    assert np.array_equal(plain, typed)
