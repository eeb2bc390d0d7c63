"""Tiny random models of images, and small images that are made in the test."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.shared_folders import written_once

TASK = "image-classification"
IMAGE_SIZE = 16
CONFIGS: dict[str, dict[str, Any]] = {
    "vit": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "image_size": IMAGE_SIZE, "patch_size": 4,
    },
    "dinov2": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2,
        "image_size": 24, "patch_size": 4,  # positions of another size, which are interpolated
    },
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "convnextv2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "mobilenet_v2": {"depth_multiplier": 0.25, "depth_divisible_by": 4, "min_depth": 4, "expand_ratio": 2.0},
    "efficientnet": {
        "width_coefficient": 0.05, "depth_coefficient": 1.0, "depth_divisor": 4, "hidden_dim": 64,
        "in_channels": [32, 160], "out_channels": [160, 320], "kernel_sizes": [3, 5], "strides": [1, 2],
        "num_block_repeats": [2, 2], "expand_ratios": [1, 2],
    },
}  # fmt: skip
LABELS = ("dark", "light")
POSITIVE_TENSORS = (
    *("running_var", "normalization.weight", "batchnorm.weight", "_bn.weight", "depthwise_norm.weight"),
    *("lambda1", "layer_scale_parameter"),
)
"""Endings of factors of channels, which a new model has as one, or as almost zero."""


@written_once
def write_model(folder: Path, family: str = "vit", **config: Any) -> Path:
    """Write a random model with its image processor into `folder`, weights drawn widely; return it."""
    import torch

    from smelt.core.files import write_json
    from smelt.models.checkpoint import load_model, save_model
    from smelt.models.new_model import create_model
    from smelt.runtimes.images import PROCESSOR_FILE, default_processor_config

    random_folder = folder.with_name(f"{folder.name}-drawn")
    for new in (folder, random_folder):
        new.mkdir(parents=True, exist_ok=True)
    write_json(folder / PROCESSOR_FILE, default_processor_config(IMAGE_SIZE))
    values = {"model_type": family} | CONFIGS[family] | config
    create_model(values, folder, random_folder, task=TASK, seed=0, labels=LABELS)
    model, edits = load_model(random_folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() > 1:
                tensor.normal_(0, 0.3)
            elif name.endswith(("running_mean", "normalization.bias")):
                tensor.normal_(0, 0.5)
            elif name.endswith(POSITIVE_TENSORS):
                tensor.uniform_(0.5, 1.5)
    (folder / PROCESSOR_FILE).unlink()
    save_model(model, edits, folder, random_folder)
    shutil.rmtree(random_folder)
    return folder


def make_image(number: int, size: tuple[int, int] = (IMAGE_SIZE, IMAGE_SIZE), mode: str = "RGB") -> Any:
    """Return an image of Pillow's `size`, noise around a gray that is dark for even numbers."""
    draw = np.random.default_rng(number)
    depth = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    values = draw.integers(0, 120, (size[1], size[0], depth)) + 130 * (number % 2)
    return Image.fromarray(values.astype(np.uint8).squeeze(), mode)


def write_rows(path: Path, count: int = 8, columns: Sequence[str] = ("image", "label")) -> Path:
    """Write `count` images next to `path`, and rows of JSON that name them; return `path`."""
    folder = path.parent / f"{path.stem}-images"
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        make_image(number).save(folder / f"{number}.png")
        values = (f"{folder.name}/{number}.png", LABELS[number % 2])
        lines.append(json.dumps(dict(zip(columns, values, strict=True))))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_class_folders(folder: Path, count: int = 8) -> Path:
    """Write `count` images into `folder`, one folder for each label; return it."""
    for number in range(count):
        class_folder = folder / LABELS[number % 2]
        class_folder.mkdir(parents=True, exist_ok=True)
        make_image(number).save(class_folder / f"{number}.png")
    return folder


def write_archive(path: Path, count: int = 8) -> Path:
    """Write `count` images into an archive as `shared/data/cifar10_jpeg` has it; return it."""
    import io

    contents = []
    for number in range(count):
        stream = io.BytesIO()
        make_image(number).save(stream, "JPEG")
        contents.append(stream.getvalue())
    offsets = np.cumsum([0, *map(len, contents)])
    labels = np.arange(count, dtype=np.uint8) % 2
    np.savez(path, jpeg=np.frombuffer(b"".join(contents), np.uint8), offsets=offsets, label=labels)
    return path


def read_rows(path: Path) -> Any:
    """Return the rows that `path` holds."""
    from smelt.data.splits import Columns
    from smelt.tasks.read_split import read_split

    return read_split(str(path), TASK, Columns(), path.parent)
