"""The families that smelt knows, by the config's model_type. A new one is its file and a line here."""

from __future__ import annotations

from typing import Any

from smelt.core.data import TASKS, Task
from smelt.core.text import article
from smelt.families import (
    bart,
    bert,
    distilbert,
    gemma,
    gpt2,
    llama,
    m2m_100,
    marian,
    mbart,
    mistral,
    modernbert,
    mpnet,
    opt,
    pegasus,
    phi3,
    qwen2,
    qwen3,
    resnet,
    roberta,
    t5,
    vit,
)
from smelt.families.family import Config, Family

_TRANSLATORS = (marian, t5, bart, mbart, pegasus, m2m_100)
_ENCODERS = (bert, distilbert, roberta, mpnet, modernbert)
_OF_IMAGES = (vit, resnet)
_LANGUAGE_MODELS = (gpt2, opt, llama, mistral, qwen2, qwen3, gemma, phi3)
FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (*_TRANSLATORS, *_ENCODERS, *_LANGUAGE_MODELS, *_OF_IMAGES)
}
# The names of the families that are for each task.
BY_TASK: dict[Task, tuple[str, ...]] = {
    task: tuple(name for name, family in FAMILIES.items() if task in family.tasks) for task in TASKS
}


# What a plan notes in the config of a model whose convolutions are codes by then.
CODED_CONVOLUTIONS = "smelt_coded_convolutions"


def find_family(config: Config) -> Family | None:
    """Return the family of a Hugging Face config, None where smelt does not know it."""
    return FAMILIES.get(str(config.get("model_type")))


def family_of(model: Any) -> Family | None:
    """Return the family of a model of transformers, None where smelt does not know it."""
    return FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))


def reads_images(config: Config) -> bool:
    """Say whether the model of a Hugging Face config reads images, and not texts."""
    family = find_family(config)
    return family is not None and family.reads == "images"


def blockless(config: Config) -> str | None:
    """Say that a model of this config has no blocks to be looked at, in words; None where it has some.

    A family that is not known is none of those: who asks says that in words of its own.
    """
    family = find_family(config)
    if family is None or family.stacks(config):
        return None
    return f"{article(family.name)} model has convolutions and no blocks of attention and feed-forward parts"
