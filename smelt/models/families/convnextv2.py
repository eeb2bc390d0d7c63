"""ConvNeXt V2: a norm over channels (GRN) between the linear layers. Source: modeling_convnextv2.py.

Otherwise as ConvNeXt.
"""

from __future__ import annotations

from smelt.models.families.family import IMAGE_TASKS, Family, PositionEncoding, PublishedLearningRate
from smelt.models.families.vit import unsupported_config

FAMILY = Family(
    name="convnextv2",
    tasks=IMAGE_TASKS,
    learning_rate=PublishedLearningRate(5e-5, None),  # as ConvNeXt
    has_linear_blocks=True,
    input_kind="images",
    position_encoding=PositionEncoding(None),
    unsupported_config=unsupported_config,
)
