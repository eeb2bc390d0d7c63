"""The supported families, by the config's model_type. A new one is a file and a line here."""

from __future__ import annotations

from typing import Any

from smelt.core.messages import with_article
from smelt.data.splits import TASKS, Task
from smelt.models.families import (
    bart,
    bert,
    distilbert,
    electra,
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
from smelt.models.families.family import Config, Family

_SEQ2SEQ_MODULES = (marian, t5, bart, mbart, pegasus, m2m_100)
_ENCODER_MODULES = (bert, distilbert, roberta, mpnet, modernbert, electra)
_IMAGE_MODULES = (vit, resnet)
_DECODER_MODULES = (gpt2, opt, llama, mistral, qwen2, qwen3, gemma, phi3)
FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (*_SEQ2SEQ_MODULES, *_ENCODER_MODULES, *_DECODER_MODULES, *_IMAGE_MODULES)
}
# The names of the families for each task.
FAMILIES_BY_TASK: dict[Task, tuple[str, ...]] = {
    task: tuple(name for name, family in FAMILIES.items() if task in family.tasks) for task in TASKS
}


# Set by a plan in the config of a model whose convolutions will be quantized.
QUANTIZED_CONVOLUTIONS_KEY = "smelt_coded_convolutions"


def find_family(config: Config) -> Family | None:
    """Return the family of a Hugging Face config, None if it is not supported."""
    return FAMILIES.get(str(config.get("model_type")))


def family_of(model: Any) -> Family | None:
    """Return the family of a transformers model, None if it is not supported."""
    return FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))


def reads_images(config: Config) -> bool:
    """Return whether the model of a Hugging Face config takes images instead of texts."""
    family = find_family(config)
    return family is not None and family.input_kind == "images"


def lacks_head(config: Config) -> bool:
    """Return whether `config` (config.json) is that of an encoder and a decoder without an output layer."""
    names = [str(name) for name in config.get("architectures") or ()]
    # MarianMTModel has an output layer despite its name
    bare = bool(names) and names[0].endswith("Model") and not names[0].endswith("MTModel")
    return bare and bool(config.get("is_encoder_decoder"))


def no_blocks_reason(config: Config) -> str | None:
    """Return the error text if a model of this config has no transformer blocks, else None.

    None for an unsupported family; callers report that themselves.
    """
    family = find_family(config)
    if family is None or family.stacks(config):
        return None
    return f"{with_article(family.name)} model has convolutions and no attention or feed-forward blocks"
