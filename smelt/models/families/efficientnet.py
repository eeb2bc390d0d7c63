"""EfficientNet, inverted residuals with squeeze and excitation. Source: modeling_efficientnet.py.

The channels inside of a block pass through a depthwise convolution, so they are no chain of two convolutions.
"""

from __future__ import annotations

from smelt.models.families.family import IMAGE_TASKS, Family, PositionEncoding, PublishedLearningRate
from smelt.models.families.vit import unsupported_config

FAMILY = Family(
    name="efficientnet",
    tasks=IMAGE_TASKS,
    learning_rate=PublishedLearningRate(5e-4, None),  # as ResNet
    has_dense_kernels=False,
    convs_and_norms=(
        ("convolution", "batchnorm"),
        ("expand_conv", "expand_bn"),
        ("depthwise_conv", "depthwise_norm"),
        ("project_conv", "project_bn"),
        ("top_conv", "top_bn"),
    ),
    layout_config={"image_size": 64, "hidden_dim": 2560},
    input_kind="images",
    position_encoding=PositionEncoding(None),
    unsupported_config=unsupported_config,
)
