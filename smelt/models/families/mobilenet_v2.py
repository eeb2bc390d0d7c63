"""MobileNetV2, a convolutional network of inverted residuals. Source: transformers' modeling_mobilenet_v2.py.

The channels inside of a block pass through a depthwise convolution, so they are no chain of two convolutions.
"""

from __future__ import annotations

from smelt.models.families.family import IMAGE_TASKS, Family, PositionEncoding, PublishedLearningRate
from smelt.models.families.vit import unsupported_config

FAMILY = Family(
    name="mobilenet_v2",
    tasks=IMAGE_TASKS,
    learning_rate=PublishedLearningRate(5e-4, None),  # as ResNet
    has_dense_kernels=False,
    convs_and_norms=(("convolution", "normalization"),),
    input_kind="images",
    position_encoding=PositionEncoding(None),
    unsupported_config=unsupported_config,
)
