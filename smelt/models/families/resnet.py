"""ResNet, a convolutional network. Source: transformers' modeling_resnet.py.

It has no blocks of attention and feed-forward parts: techniques on those reject it.
"""

from __future__ import annotations

from smelt.models.families.family import IMAGE_TASKS, Family, PositionEncoding, PublishedLearningRate
from smelt.models.families.vit import unsupported_config

FAMILY = Family(
    name="resnet",
    tasks=IMAGE_TASKS,
    learning_rate=PublishedLearningRate(5e-4, None),  # as benchmarks/recipes/resnet-cifar10.yaml
    input_kind="images",
    convs_and_norms=(("convolution", "normalization"),),
    conv_chain="layer",  # of a basic or a bottleneck block
    conv_shortcut="shortcut",
    position_encoding=PositionEncoding(None),
    unsupported_config=unsupported_config,
)
