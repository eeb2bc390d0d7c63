"""PyTorch modules of the user's own (`model: {module: ...}`): no layout is known, layers are found by type.

They are no families of transformers and not in FAMILIES: `find_family` and `family_of` return them.
"""

from __future__ import annotations

from dataclasses import replace

from smelt.core.errors import InputError
from smelt.core.user_code import recorded_source
from smelt.data.tasks import tasks_with
from smelt.models.families.family import IMAGE_TASKS, Family, PositionEncoding, PublishedLearningRate
from smelt.models.families.layout import Config


def unsupported_config(config: Config) -> list[str]:
    """Return why the code of a module is not run: its user has not named it in a recipe."""
    try:
        recorded_source(str(config.get("module", "")), str(config.get("source_hash", "")))
    except InputError as error:
        return [str(error)]
    return []


IMAGES_FAMILY = Family(
    name="torch-module",
    tasks=IMAGE_TASKS,
    learning_rate=PublishedLearningRate(5e-4, None),  # as ResNet's
    input_kind="images",
    is_user_module=True,
    position_encoding=PositionEncoding(None),
    unsupported_config=unsupported_config,
)
ARRAYS_FAMILY = replace(
    IMAGES_FAMILY, name="torch-module-arrays", tasks=tasks_with(modality="arrays"), input_kind="arrays"
)
TEXT_FAMILY = replace(
    IMAGES_FAMILY, name="torch-module-text", tasks=("text-classification",), input_kind="texts"
)
MODULE_FAMILIES = {family.name: family for family in (IMAGES_FAMILY, ARRAYS_FAMILY, TEXT_FAMILY)}
