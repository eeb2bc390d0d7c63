"""ConvNeXt, a convolutional network with linear layers. Source: transformers' modeling_convnext.py.

A block is a depthwise convolution, a norm and two linear layers. Its stages have different widths, and no
attention: techniques on blocks of attention and feed-forward parts reject it.
"""

from __future__ import annotations

from smelt.models.families.family import IMAGE_TASKS, Family, PositionEncoding, PublishedLearningRate
from smelt.models.families.vit import unsupported_config

FAMILY = Family(
    name="convnext",
    tasks=IMAGE_TASKS,
    learning_rate=PublishedLearningRate(5e-5, None),  # fine-tuning; arXiv:2201.03545, appendix A
    has_linear_blocks=True,
    input_kind="images",
    position_encoding=PositionEncoding(None),
    unsupported_config=unsupported_config,
)
