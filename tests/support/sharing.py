"""Tiny models of three layers of every family, and what sharing weights is checked with."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import causal
import classifiers
import every_family
import seq2seq
import tiny
import torch

from smelt.core.data import Columns, Task, read_split
from smelt.core.stage import Context
from smelt.families.registry import FAMILIES
from smelt.families.walk import blocks_of

# three layers: the third is no neighbour of the pair that shares, and nothing of it may be touched
MAKERS: dict[str, Callable[[Path], Path]] = {
    "marian": lambda f: tiny.marian(f, encoder_layers=3, decoder_layers=3),
    "t5": lambda f: seq2seq.t5(f, gated=True, num_layers=3, num_decoder_layers=3),
    "bart": lambda f: seq2seq.bart(f, encoder_layers=3, decoder_layers=3),
    "mbart": lambda f: seq2seq.bart(f, kind="mbart", encoder_layers=3, decoder_layers=3),
    "bert": lambda f: tiny.bert(f, num_hidden_layers=3),
    "distilbert": lambda f: classifiers.distilbert(f, n_layers=3),
    "roberta": lambda f: classifiers.roberta(f, num_hidden_layers=3),
    "gpt2": lambda f: causal.model(f, "gpt2", n_layer=3, n_embd=64),
    "llama": lambda f: causal.model(f, "llama", num_hidden_layers=3),
    "qwen2": lambda f: causal.model(f, "qwen2", num_hidden_layers=3),
}


@functools.cache
def folder_of(family: str) -> Path:
    """Return a random model of `family` with three layers in each stack; read only."""
    folder = Path(tempfile.mkdtemp(prefix=f"smelt-{family}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if family in MAKERS:
        return MAKERS[family](folder / "model")
    both = FAMILIES[family].kind == "seq2seq"
    layers = {"encoder_layers": 3, "decoder_layers": 3} if both else {"num_hidden_layers": 3}
    return every_family.make(folder / "model", family, **layers)


def run(stage: Any, settings: Any, source: Path, family: str, out: Path) -> Context:
    """Run a stage on `source`; return what it was given to report to, with its new folder `out`."""
    out.mkdir()
    task: Task = FAMILIES[family].tasks[0]
    if task == "language-modeling":
        split = read_split(str(causal.lines(out.with_suffix(".txt"), 2)), task, Columns(), out)
    else:
        write = tiny.labelled if task == "text-classification" else tiny.pairs
        split = read_split(str(write(out.with_suffix(".jsonl"))), task, Columns(), out)
    ctx = Context(
        out=out, task=task, data={"train": split, "validation": split}, seed=0, ancestors={},
        score=lambda artifact: {}, threads=1, device="cpu",
    )  # fmt: skip
    stage(tiny.artifact(source, task), settings, ctx)
    return ctx


def share(family: str, out: Path, **settings: Any) -> Path:
    """Share weights in a model of `family`; return the folder of the result."""
    from smelt.compress.share.layers import Share, ShareSettings

    return run(Share(), ShareSettings(**settings), folder_of(family), family, out).out


def logits(model: Any) -> torch.Tensor:
    """Return what `model` makes of fixed tokens."""
    ids = torch.randint(5, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    more = {"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: torch.Tensor = model(ids, **more).logits
    return found


def products(model: Any) -> dict[tuple[str, str, int], list[list[str]]]:
    """Return by stack and part the names of the products of each block."""
    parts: dict[tuple[str, str, int], list[list[str]]] = {}
    for block in blocks_of(model):
        for at, a in enumerate(block.attentions):
            names = dict.fromkeys((a.query, a.key, a.value, a.out))
            parts.setdefault((block.stack.name, "attention", at), []).append(list(names))
        feed = block.feed_forward
        names = dict.fromkeys((feed.up, feed.gate or feed.up, feed.down))
        parts.setdefault((block.stack.name, "ffn", 0), []).append(list(names))
    return parts


def assert_first_two_are_one(model: Any) -> None:
    """Check that the first two of three blocks have the same products, and the third others."""
    for blocks in products(model).values():
        for first, second, third in zip(*blocks, strict=True):
            assert model.get_submodule(first) is model.get_submodule(second)
            assert model.get_submodule(first) is not model.get_submodule(third)
