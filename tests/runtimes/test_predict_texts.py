"""Outputs that are not numbers are an error: argmax of NaN is class 0, and a cosine with it is no number."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from smelt.core.errors import RunError
from smelt.data.splits import Example
from smelt.runtimes.images import image_logits
from smelt.runtimes.predict_texts import class_logits, embed_texts
from smelt.runtimes.registry import open_folder
from tests.support.expected_errors import raises_code
from tests.support.models import images, tiny


@pytest.fixture
def ruined(tmp_path):
    """A classifier of which one weight of the head is NaN."""
    folder = tiny.write_bert(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["classifier.weight"][1, 0] = np.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_classifier_with_nan_logits_is_refused(ruined):
    with open_folder(ruined, "torch", None) as runner, pytest.raises(RunError) as error:
        class_logits(runner, [Example("a man"), Example("a dog runs")])
    assert error.value.code == "non-finite-outputs"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_vectors_are_refused(monkeypatch, value):
    vectors = np.array([[1.0, 2.0], [3.0, value]], dtype=np.float32)
    monkeypatch.setattr("smelt.runtimes.predict_texts._forward", lambda *arguments: vectors)
    with raises_code("non-finite-outputs", RunError):
        embed_texts(None, ["a", "b"])


def test_images_with_nan_logits_are_refused_by_every_caller(tmp_path):
    """`smelt.load(...).classify` asks for the logits itself."""
    folder = images.write_model(tmp_path / "model", "vit")
    weights = load_file(folder / "model.safetensors")
    weights["classifier.weight"][0, 0] = np.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with open_folder(folder, "torch", None) as runner, pytest.raises(RunError) as error:
        image_logits(runner, [images.make_image(0)])
    assert error.value.code == "non-finite-outputs"
