"""A text CNN as a user's PyTorch module, its tokenizer, samples and recipes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CODE = """
import torch
from torch import nn


class TextCnn(nn.Module):
    def __init__(self, tokens=23, width=32):
        super().__init__()
        self.embed = nn.Embedding(tokens, width, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, size, padding=size // 2) for size in (3, 5))
        self.hidden, self.head = nn.Linear(2 * width, 64), nn.Linear(64, 2)

    def forward(self, input_ids, attention_mask):
        padding = attention_mask[:, None] == 0
        x = self.embed(input_ids).transpose(1, 2).masked_fill(padding, 0)
        pooled = [conv(x).relu().masked_fill(padding, 0).amax(2) for conv in self.convs]
        return self.head(self.hidden(torch.cat(pooled, 1)).relu())


class FixedLength(TextCnn):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids.reshape(-1, 16), attention_mask.reshape(-1, 16))


def text_cnn():
    return TextCnn()


def small_table():
    return TextCnn(tokens=10)


def fixed_length():
    return FixedLength()
"""
_POSITIVE, _NEGATIVE = ["good", "great", "fine"], ["bad", "awful", "dull"]
_NEUTRAL = ["a", "an", "the", "film", "movie", "plot", "actor", "scene", "is", "was", "with", "and"]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def build(function: str) -> Any:
    """Return the module that a function of CODE builds, with random weights."""
    import torch

    namespace: dict[str, Any] = {"__name__": "nets"}
    exec(compile(CODE, "nets.py", "exec"), namespace)
    torch.manual_seed(0)
    return namespace[function]().eval()


def _write_rows(path: Path, count: int, seed: int) -> None:
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            label = draw.choice(["positive", "negative"])
            words = draw.choices(_NEUTRAL, k=draw.randint(1, 20))
            words.append(draw.choice(_POSITIVE if label == "positive" else _NEGATIVE))
            draw.shuffle(words)
            file.write(json.dumps({"text": " ".join(words), "label": label}) + "\n")


def write_module(folder: Path, function: str = "text_cnn") -> Path:
    """Write nets.py, the weights FUNCTION.safetensors, a tokenizer and samples into `folder`; return it."""
    from safetensors.torch import save_file

    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    (folder / "nets.py").write_text(CODE)
    save_file(build(function).state_dict(), folder / f"{function}.safetensors")
    words = [*_SPECIAL, *_NEUTRAL, *_POSITIVE, *_NEGATIVE]
    (folder / "tokenizer" / "vocab.txt").write_text("\n".join(words) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "model_max_length": 64}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    for seed, (name, count) in enumerate({"train": 160, "validation": 32, "test": 100}.items()):
        _write_rows(folder / f"{name}.jsonl", count, seed)
    return folder


def write_recipe(
    folder: Path, function: str = "text_cnn", stages: tuple[str, ...] = ("onnx",), **model: Any
) -> Path:
    """Write a recipe for the module of `write_module`; `model` replaces keys of the model. Return it."""
    keys = {"module": f"nets:{function}", "weights": f"{function}.safetensors", "tokenizer": "tokenizer"}
    keys = keys | {"labels": "[negative, positive]"} | model
    path = folder / "recipe.yaml"
    path.write_text(
        "model:\n"
        + "".join(f"  {name}: {value}\n" for name, value in keys.items() if value is not None)
        + "task: text-classification\nthreads: 1\nscore: {latency: false}\n"
        + "data: {train: train.jsonl, validation: validation.jsonl, test: test.jsonl}\nstages:\n"
        + "".join(f"  - {stage}\n" for stage in stages)
    )
    return path
