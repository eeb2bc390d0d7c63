"""Tiny random models of images and texts, and small images with captions that are made in the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.models import images
from tests.support.shared_folders import written_once

TASK = "image-text"
WORDS = ("a", "photo", "of", "dark", "light", "cat", "dog", "the", "picture", "gray")
SPECIAL_TOKENS = ("<pad>", "<unk>", "<start>", "<end>")
MAX_LENGTH = 12
VISION_CONFIG = {
    "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": images.IMAGE_SIZE, "patch_size": 4, "projection_dim": 16,
}  # fmt: skip
TEXT_CONFIG = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": MAX_LENGTH, "vocab_size": len(SPECIAL_TOKENS) + len(WORDS), "pad_token_id": 0,
    "bos_token_id": 2, "eos_token_id": 3, "projection_dim": 16, "projection_size": 24,
}  # fmt: skip


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of `WORDS` with a start and an end into `folder`; return it."""
    import tokenizers
    import transformers
    from tokenizers import models, pre_tokenizers, processors

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *WORDS))}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 2), ("<end>", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<start>",
        eos_token="<end>", model_max_length=MAX_LENGTH,
    ).save_pretrained(folder)  # fmt: skip
    return folder


@written_once
def write_model(folder: Path, family: str = "clip", **sizes: int) -> Path:
    """Write a random model with tokenizer and image processor into `folder`, weights drawn widely; return it.

    sizes: by config key of both towers.
    """
    import torch
    import transformers

    from smelt.core.files import write_json
    from smelt.runtimes.images import PROCESSOR_FILE, default_processor_config

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    write_json(folder / PROCESSOR_FILE, default_processor_config(images.IMAGE_SIZE))
    config = transformers.AutoConfig.for_model(
        family, text_config=TEXT_CONFIG | sizes, vision_config=VISION_CONFIG | sizes, projection_dim=16
    )
    if family == "siglip":  # both embeddings have the width of the vision tower
        config.text_config.projection_size = config.vision_config.hidden_size
    torch.manual_seed(0)
    model: Any = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.normal_(0, 0.3)
        model.logit_scale.fill_(1.5)
        if family == "siglip":
            model.logit_bias.fill_(-2.0)  # not 0, so that a missing bias changes probabilities
    model.save_pretrained(folder)
    return folder


def write_pairs(path: Path, count: int = 8, labeled: bool = False) -> Path:
    """Write `count` images next to `path`, and rows of JSON with their captions; return `path`.

    labeled: rows have labels instead.
    """
    folder = path.parent / f"{path.stem}-images"
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        images.make_image(number).save(folder / f"{number}.png")
        row = {"image": f"{folder.name}/{number}.png"}
        if labeled:
            row["label"] = images.LABELS[number % 2]
        else:
            animal = ("cat", "dog")[number // 2 % 2]
            row["text"] = f"a {images.LABELS[number % 2]} photo of the {animal}"
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return path


def read_pairs(path: Path) -> Any:
    """Return the rows that `path` holds."""
    from smelt.data.splits import Columns
    from smelt.tasks.read_split import read_split

    return read_split(str(path), TASK, Columns(), path.parent)
