"""Logits of images are transformers' own, and an image that cannot be read is told with its row."""

import numpy as np
import pytest
from PIL import Image

from smelt.core.errors import InputError
from smelt.data.splits import Example
from smelt.runtimes.images import image_logits
from smelt.runtimes.predict_texts import class_logits
from smelt.runtimes.registry import open_runner
from tests.support.expected_errors import raises_code
from tests.support.models import images, tiny


@pytest.fixture(scope="module", params=images.CONFIGS)
def runner(request, tmp_path_factory):
    folder = images.write_model(tmp_path_factory.mktemp("images") / "model", request.param)
    with open_runner(tiny.as_artifact(folder, images.TASK), 1, "cpu") as opened:
        yield opened


def test_logits_equal_transformers(runner, tmp_path):
    import torch
    import transformers

    paths = []
    for number in range(5):
        images.make_image(number, (20 + number, 17)).save(tmp_path / f"{number}.png")
        paths.append(str(tmp_path / f"{number}.png"))
    processor = transformers.ViTImageProcessorPil.from_pretrained(runner.folder)
    model = transformers.AutoModelForImageClassification.from_pretrained(runner.folder).eval()
    with torch.no_grad():
        expected = model(**processor([Image.open(p) for p in paths], return_tensors="pt")).logits.numpy()
    logits = class_logits(runner, [Example(path) for path in paths], batch_size=2)
    assert np.abs(logits - expected).max() < 1e-4
    assert np.ptp(expected) > 0.1
    opened = image_logits(runner, [Image.open(path) for path in paths], batch_size=2)
    assert np.array_equal(opened, logits)


def test_truncated_file_is_reported_with_its_row(runner, tmp_path):
    path = tmp_path / "cut.jpg"
    images.make_image(1, (200, 200)).save(path)
    path.write_bytes(path.read_bytes()[:900])
    with raises_code("damaged-image", InputError) as caught:
        class_logits(runner, [Example(str(path), row=4)])
    assert all(part in str(caught.value) for part in ("row 4:", "cut.jpg"))
    with raises_code("empty-data", InputError):
        image_logits(runner, [])


def test_truncated_opened_image_is_reported(runner, tmp_path):
    path = tmp_path / "short.png"
    images.make_image(1, (60, 60)).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    with Image.open(path) as opened, raises_code("damaged-image", InputError) as caught:
        image_logits(runner, [images.make_image(0), opened])
    assert "image 2:" in str(caught.value)
