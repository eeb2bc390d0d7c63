"""Poolings whose window is larger than the map."""

import numpy as np
import pytest
import torch
from torch import nn

from smelt.core.artifact import Artifact
from smelt.export.graphs.pooling import exportable_pooling
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.runtimes.images import image_logits
from smelt.runtimes.registry import open_runner
from tests.support.graphs import graph_exports
from tests.support.models import images, tiny


@pytest.mark.quick
@pytest.mark.parametrize("pooling", [nn.AvgPool2d, nn.MaxPool2d])
@pytest.mark.parametrize("size", [(2, 2), (1, 5), (7, 2)])
def test_replaced_pooling_equals_that_of_torch(pooling, size):
    model = nn.Sequential(pooling(5, ceil_mode=True))
    maps = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    expected = model(maps)
    with exportable_pooling(model):
        torch.testing.assert_close(model(maps), expected)
    assert "forward" not in vars(model[0])


def test_openvino_runs_efficientnet_of_maps_smaller_than_its_window(tmp_path):
    source = tiny.as_artifact(images.write_model(tmp_path / "model", "efficientnet"), images.TASK)
    ctx = graph_exports.make_context(tmp_path / "openvino", images.TASK)
    Onnx()(source, OnnxSettings(target="openvino"), ctx)
    manifest = source.manifest.model_copy(update={"format": "onnx", "details": ctx.details})
    pictures = [images.make_image(number) for number in range(3)]
    logits = []
    for artifact in (source, Artifact(ctx.out, manifest)):
        with open_runner(artifact, threads=1) as runner:
            logits.append(image_logits(runner, pictures, batch_size=3))
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-3, rtol=1e-3)
