"""PyTorch modules of a user with arrays as inputs and outputs, their samples and recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CODE = """
import torch
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.layers = nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.position, self.kind = nn.Linear(width, 3), nn.Linear(width, 5)

    def forward(self, signal, code):
        x = self.layers(torch.cat([signal, self.embed(code).mean(1)], 1))
        return {"position": self.position(x), "kind": self.kind(x)}


class Denoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.start, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.middle, self.mix = nn.Conv2d(width, width, 3, padding=1), nn.Linear(12, 12)
        self.end = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, image, gain=None):
        y = self.end(self.mix(self.middle(self.norm(self.start(image)).relu()).relu()))
        return image - (y if gain is None else y * gain[:, None, None, None])


class Branching(Denoiser):
    def forward(self, image):
        return super().forward(image if float(image.mean()) < 1e9 else -image)


class Returning(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.linear, self.result = nn.Linear(8, 4), result

    def forward(self, signal):
        return self.result(self.linear(signal))


class Reserved(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, labels):
        return self.linear(labels)


class Unnamed(Reserved):
    def forward(self, *signals):
        return self.linear(signals[0])


def two_heads():
    return TwoHeads()


def denoiser():
    return Denoiser()


def branching():
    return Branching()


def reserved():
    return Reserved()


def unnamed():
    return Unnamed()


def integers():
    return Returning(lambda y: y.argmax(1))


def mean():
    return Returning(lambda y: y.mean(0))


def nothing():
    return Returning(lambda y: ())


def text():
    return Returning(str)


def renamed():
    return Returning(lambda y: {"signal": y})


def pair():
    return Returning(lambda y: (y, [y * 2]))


def several():
    return Returning(lambda y: (y, y * 2))


def one_number():
    return Returning(lambda y: y[:, 0])


def failing():
    return Returning(lambda y: y.reshape(7, 7))
"""
METRICS = """
def error(predictions, references, sources):
    return [float(((p["output"] - s["clean"]) ** 2).mean()) for p, s in zip(predictions, sources)]
"""


def build(function: str) -> Any:
    """Return the module that a function of CODE builds, with random weights."""
    import torch

    namespace: dict[str, Any] = {"__name__": "nets"}
    exec(compile(CODE, "nets.py", "exec"), namespace)
    torch.manual_seed(0)
    return namespace[function]().eval()


def write_samples(path: Path, count: int, seed: int) -> None:
    """Write samples for all modules of CODE, and `clean` images, which only a metric reads."""
    import numpy as np

    draw = np.random.default_rng(seed)
    clean = draw.normal(size=(count, 1, 12, 12)).cumsum(-1) * 0.3
    np.savez(
        path,
        signal=draw.normal(size=(count, 8)),
        code=draw.integers(0, 10, (count, 4)),
        image=(clean + draw.normal(size=clean.shape)).astype(np.float32),
        gain=draw.uniform(0.5, 1.5, count),
        labels=draw.normal(size=(count, 8)),
        clean=clean,
    )


def write_module(folder: Path, function: str) -> Path:
    """Write nets.py, the weights FUNCTION.safetensors, samples and a metric into `folder`; return it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nets.py").write_text(CODE)
    (folder / "my_metrics.py").write_text(METRICS)
    save_file(build(function).state_dict(), folder / f"{function}.safetensors")
    for seed, (name, count) in enumerate({"train": 32, "validation": 16, "test": 16}.items()):
        write_samples(folder / f"{name}.npz", count, seed)
    return folder


def write_recipe(
    folder: Path, function: str, stages: tuple[str, ...] = ("onnx",), data: str = "", **model: Any
) -> Path:
    """Write a recipe for the module of `write_module`; `model` has more keys of the model. Return it."""
    keys = {"module": f"nets:{function}", "weights": f"{function}.safetensors"} | model
    path = folder / "recipe.yaml"
    path.write_text(
        "model:\n"
        + "".join(f"  {name}: {value}\n" for name, value in keys.items())
        + "task: custom\nthreads: 1\nscore: {latency: false}\n"
        + f"data: {{train: train.npz, validation: validation.npz, test: test.npz{data}}}\nstages:\n"
        + "".join(f"  - {stage}\n" for stage in stages)
    )
    return path
