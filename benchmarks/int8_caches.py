"""What `onnx: {kv_cache: int8}` does to a whole model: the time of a step, and perplexity.

    python benchmarks/int8_caches.py steps --tokenizer FOLDER --text FILE --rounds 30
    python benchmarks/int8_caches.py perplexity --model ARTIFACT --train FILE --test FILE --windows 200

`steps` makes a random Llama and exports it with float and with int8 caches, with float and with int8 weights;
then processor time of a prompt and of a step on top of it, one thread, in turns: medians, and of the ratio of
a round's two times median, 10th and 90th percentile. `perplexity` scores windows of a text on a trained
model: each is fed in pieces, so that all but the first read what the pieces before them have left; the
difference of the mean loss comes with a bootstrap interval over windows. A third arm has the keys' scales of
largest numbers, and not of largest lengths of rotated pairs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.core.artifact import Artifact, Manifest, read_artifact
from smelt.core.stage import Context
from smelt.data.examples import read_split
from smelt.data.splits import Columns, Split, Task
from smelt.export.onnx_stage import Onnx, OnnxSettings
from smelt.export.precision import kv_cache as export_int8_cache
from smelt.export.precision import kv_cache as int8_kv_cache
from smelt.generation.runners import nll_from_logits
from smelt.runtimes.registry import open_folder

TASK: Task = "language-modeling"
SHAPE = {
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}  # fmt: skip


def text_of(path: Path) -> Split:
    return read_split(path.name, TASK, Columns(), path.parent)


def context(out: Path, train: Split) -> Context:
    out.mkdir(parents=True)
    return Context(
        out=out, task=TASK, data={"train": train}, seed=0, ancestors={}, score=lambda *_: {}, threads=1
    )


def export_model(model: Artifact, train: Split, out: Path, kv_cache: Any) -> dict[str, Any]:
    """Export `model` without loops; return the stage's details."""
    ctx = context(out, train)
    Onnx()(model, OnnxSettings(kv_cache=kv_cache, generation_graph=False), ctx)
    return ctx.details


def artifact(folder: Path) -> Artifact:
    manifest = Manifest(
        key="0" * 64, format="torch", task=TASK, stage="model", settings={}, seed=0, parent=None, versions={}
    )
    return Artifact(folder, manifest)


def write_llama(folder: Path, tokenizer: Path, keys: int) -> Path:
    """Write a random Llama of `SHAPE` with so many key-value heads."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    words = AutoTokenizer.from_pretrained(tokenizer)
    words.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_key_value_heads=keys, vocab_size=len(words), tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def time_steps(options: argparse.Namespace, home: Path) -> None:
    train = text_of(options.text)
    print(
        "| weights | key-value heads | past | fed | float caches, ms | int8 caches, ms | ratio | caches, MB |"
    )
    for keys in (8, 2):
        folder = write_llama(home / f"m{keys}", options.tokenizer, keys)
        ctx = context(home / f"codes{keys}", train)
        Quantize()(artifact(folder), QuantizeSettings(scheme="int8-dynamic"), ctx)
        for weights, source in (("float32", folder), ("int8-dynamic", ctx.out)):
            details: dict[str, Any] = {}
            for kind in ("float", "int8"):
                details = export_model(artifact(source), train, home / f"{weights}-{kind}{keys}", kind)
            folders = [home / f"{weights}-{kind}{keys}" for kind in ("float", "int8")]
            for past in (500, 2000):
                time_models(
                    folders, weights, keys, past, details["kv_cache"]["bytes_per_token"], options.rounds
                )


def time_models(folders: list[Path], weights: str, keys: int, past: int, size: Any, rounds: int) -> None:
    ids = np.random.default_rng(0).integers(3, 8000, (1, past))
    runners = [open_folder(folder, "onnx", "ort-cpu", 1) for folder in folders]
    megabytes = " → ".join(f"{size[word] * past / 1e6:.1f}" for word in ("float32", "int8"))
    for fed, ask, count in (("0", time_prefill, min(rounds, 5)), (str(past), time_round, rounds)):
        times: list[list[float]] = [[], []]
        for _ in range(count):
            for runner, found in zip(runners, times, strict=True):
                found.append(ask(runner, ids))
        ratios = np.array(times[1]) / np.array(times[0])
        low, middle, high = np.percentile(ratios, [10, 50, 90])
        before, after = (np.median(found) for found in times)
        print(
            f"| {weights} | {keys} | {fed} | {past if fed == '0' else 1} | {before:.2f} | {after:.2f} |"
            f" {middle:.2f} [{low:.2f}, {high:.2f}] | {megabytes} |",
            flush=True,
        )
    for runner in runners:
        runner.close()


_PREFILLED: dict[Any, Any] = {}
_STEPS_PER_ROUND = 8


def time_prefill(runner: Any, ids: Any) -> float:
    """Return the milliseconds of taking in `ids`, with the logits of the last token."""
    begun = time.process_time()
    runner.extend(runner.start(1), ids, np.ones_like(ids), last=1)
    return (time.process_time() - begun) * 1e3


def time_round(runner: Any, ids: Any) -> float:
    """Return the mean milliseconds of a step on top of `ids`, which are taken in once for all rounds."""
    key = (id(runner), ids.shape)
    if key not in _PREFILLED:
        state = runner.start(1)
        runner.extend(state, ids, np.ones_like(ids), last=1)
        _PREFILLED[key] = (state.backend_state.caches, state.mask)
    caches, mask = _PREFILLED[key]
    state = runner.start(1)
    state.mask = mask
    state.backend_state.caches, state.backend_state.cache_length = list(caches), mask.shape[1]
    runner.decode_step(state, ids[0, :1])  # it makes room in the caches, once for many steps
    begun = time.process_time()
    for token in ids[0, :_STEPS_PER_ROUND]:
        runner.decode_step(state, np.array([token]))
    return (time.process_time() - begun) / _STEPS_PER_ROUND * 1e3


def print_perplexity(options: argparse.Namespace, home: Path) -> None:
    from transformers import AutoTokenizer

    model, train = read_artifact(options.model), text_of(options.train)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = np.array(tokenizer("\n".join(e.text for e in text_of(options.test).examples))["input_ids"])
    count = min(options.windows, (len(ids) - 1) // options.length)
    windows = [ids[at * options.length :][: options.length + 1] for at in range(count)]
    arms = {"float": "float", "int8": "int8", "int8, largest numbers": "int8"}
    losses: dict[str, Any] = {}
    for arm, kind in arms.items():
        rotated = (lambda model: set()) if "numbers" in arm else int8_kv_cache.rotated_keys
        setattr(export_int8_cache, "rotated_keys", rotated)  # noqa: B010 -- the stage has no setting for it
        out = home / arm.replace(" ", "-")
        print(arm, export_model(model, train, out, kind).get("kv_cache"), flush=True)
        with open_folder(out, "onnx", "ort-cpu", 1) as runner:
            losses[arm] = np.stack([chunked_losses(runner, window, options.piece) for window in windows])
    print("| caches | perplexity | loss minus float's, nats | 95 % | of the second half | 95 % | tokens |")
    rng = np.random.default_rng(0)
    for arm, found in losses.items():
        cells = []
        for part in (slice(None), slice(options.length // 2, None)):
            moved = (found - losses["float"])[:, part].mean(axis=1)
            drawn = moved[rng.integers(0, count, (10_000, count))].mean(axis=1)
            low, high = np.percentile(drawn, [2.5, 97.5])
            cells.append(f"{moved.mean():.6f} | {low:.6f} to {high:.6f}")
        print(f"| {arm} | {np.exp(found.mean()):.4f} | {' | '.join(cells)} | {found.size} |", flush=True)


def chunked_losses(runner: Any, window: Any, piece: int) -> Any:
    """Return the loss of every token of a window but the first, fed `piece` at a time."""
    state, found = runner.start(1), []
    for at in range(0, len(window) - 1, piece):
        fed = np.ascontiguousarray(window[None, at : min(at + piece, len(window) - 1)])
        logits = runner.extend(state, fed, np.ones_like(fed))
        found.append(nll_from_logits(logits, window[None, at + 1 : at + 1 + fed.shape[1]])[0])
    return np.concatenate(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = parser.add_subparsers(required=True)
    way = ways.add_parser("steps")
    way.add_argument("--tokenizer", type=Path, required=True)
    way.add_argument("--text", type=Path, required=True)
    way.add_argument("--rounds", type=int, default=30)
    way.set_defaults(run=time_steps)
    way = ways.add_parser("perplexity")
    for name in ("--model", "--train", "--test"):
        way.add_argument(name, type=Path, required=True)
    way.add_argument("--windows", type=int, default=200)
    way.add_argument("--length", type=int, default=512)
    way.add_argument("--piece", type=int, default=32)
    way.set_defaults(run=print_perplexity)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asked.run(asked, Path(folder))
