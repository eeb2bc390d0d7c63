"""PyTorch modules of a user: their code, their weights, and recipes with them as model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.models import images

CODE = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.conv2 = nn.Conv2d(width, width, 1)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(self.depthwise(y))))


class Cnn(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(Block(width), nn.MaxPool2d(2), Block(width))
        self.head = nn.Linear(16 * width, 2)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).flatten(1))


class MixerLayer(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.layers = nn.Sequential(MixerLayer(16, width), MixerLayer(16, width))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class WideNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.norm = WideNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.read = nn.Linear(16, 16)
        self.inner = nn.Linear(16, 32)
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        x = F.linear(self.norm(self.patches(x)).flatten(2).transpose(1, 2), self.read.weight)
        return self.head(self.inner(x + self.attention(x, x, x)[0]).mean(1))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 4, 4), WideNorm(16)
        self.both, self.scale = nn.Conv2d(16, 32, 1), nn.Parameter(torch.full((16, 1, 1), 0.5))
        self.scaled, self.last = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        value, gate = self.both(self.norm(self.first(x))).chunk(2, 1)
        x = self.scaled(value * gate.sigmoid()) * self.scale
        return self.head(self.last(x).mean((2, 3)))


class FixedWidth(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 4, 4), nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.second(self.first(x)).reshape(-1, 16, 16).mean(2))


class Branching(Cnn):
    def forward(self, x):
        return super().forward(x if float(x.mean()) < 1e9 else -x)


class Limited(Cnn):
    def forward(self, x):
        if len(x) > 4:
            raise ValueError("at most 4 images")
        return super().forward(x)


class Training(Cnn):
    def __init__(self):
        super().__init__()
        self.train()


class Printing(Cnn):
    def __init__(self):
        super().__init__()
        print("built")

    def forward(self, x):
        print("called")
        return super().forward(x)


class Tied(Mixer):
    def __init__(self):
        super().__init__()
        self.layers[1].channels[0].weight = self.layers[0].channels[0].weight


def cnn():
    return Cnn()


def mixer():
    return Mixer()


def attentive():
    return Attentive()


def gated():
    return Gated()


def fixed_width():
    return FixedWidth()


def branching():
    return Branching()


def limited():
    return Limited()


def training():
    return Training()


def printing():
    return Printing()


def tied():
    return Tied()


def features():
    return Cnn().stem


def text():
    return "no module"


def broken():
    raise ValueError("no such size")
"""
SIZE = (images.IMAGE_SIZE, images.IMAGE_SIZE)


def build(function: str) -> Any:
    """Return the module that a function of CODE builds, with random weights and statistics of norms."""
    import torch

    namespace: dict[str, Any] = {"__name__": "nets"}
    exec(compile(CODE, "nets.py", "exec"), namespace)
    torch.manual_seed(0)
    network = namespace[function]()
    for name, tensor in network.state_dict().items():
        if name.endswith("running_mean"):
            tensor.normal_(0, 0.5)
        elif name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
    return network.eval()


def write_module(folder: Path, function: str = "cnn") -> Path:
    """Write nets.py, the weights FUNCTION.safetensors and images into `folder`; return it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nets.py").write_text(CODE)
    save_file(build(function).state_dict(), folder / f"{function}.safetensors")
    images.write_rows(folder / "train.jsonl", 16)
    images.write_rows(folder / "test.jsonl", 8)
    return folder


def write_recipe(
    folder: Path, function: str = "cnn", stages: tuple[str, ...] = ("onnx",), **model: Any
) -> Path:
    """Write a recipe for the module of `write_module`; `model` replaces keys of the model. Return it."""
    keys = {"module": f"nets:{function}", "weights": f"{function}.safetensors", "image_size": 16} | model
    keys = {"labels": "[dark, light]"} | keys
    lines = "".join(f"  {name}: {value}\n" for name, value in keys.items() if value is not None)
    path = folder / "recipe.yaml"
    path.write_text(
        f"model:\n{lines}task: {images.TASK}\nthreads: 1\nscore: {{latency: false}}\n"
        "data: {train: train.jsonl, validation: train.jsonl, test: test.jsonl}\nstages:\n"
        + "".join(f"  - {stage}\n" for stage in stages)
    )
    return path


def model_folder(folder: Path, function: str) -> Path:
    """Return the folder that the plan writes for a module of CODE, below which no step has run."""
    from smelt.pipeline.plan.load_plan import load_plan

    plan = load_plan(write_recipe(write_module(folder, function), function))
    assert plan.local_model is not None
    return plan.local_model
