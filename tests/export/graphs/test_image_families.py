"""Graphs and the torch runner of image models give the logits of transformers, family by family."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageClassification

from smelt.core.artifact import Artifact
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.runtimes.images import batch_images, image_logits, read_processor
from smelt.runtimes.registry import open_runner
from tests.support.graphs import graph_exports
from tests.support.models import images, tiny


def expected_logits(folder, pictures):
    """The logits of transformers' own model, for what the processor makes of `pictures`."""
    batch = batch_images(pictures, read_processor(folder), [str(n) for n in range(len(pictures))])
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(pixel_values=torch.from_numpy(batch.pixel_values)).logits.numpy()


@pytest.mark.parametrize("family", sorted(images.CONFIGS))
def test_runners_equal_transformers_logits(family, tmp_path):
    source = tiny.as_artifact(images.write_model(tmp_path / "model", family), images.TASK)
    ctx = graph_exports.make_context(tmp_path / "onnx", images.TASK)
    Onnx()(source, OnnxSettings(), ctx)
    manifest = source.manifest.model_copy(update={"format": "onnx", "details": ctx.details})
    pictures = [images.make_image(number) for number in range(5)]
    expected = expected_logits(source.path, pictures)
    for artifact in (source, Artifact(ctx.out, manifest)):
        with open_runner(artifact, threads=1) as runner:
            np.testing.assert_allclose(
                image_logits(runner, pictures, batch_size=2), expected, atol=1e-4, rtol=1e-4
            )
    assert np.ptp(expected, axis=0).max() > 0.01
