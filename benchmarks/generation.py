"""Beam search in smelt's runners beside transformers' `generate`: texts, BLEU and processor time.

    python benchmarks/generation.py TEST.jsonl.gz TORCH_ARTIFACT [ARTIFACT ...] --num-beams 1 4 --limit 100

One thread. Time is the process's own processor time, in rounds that alternate between all, so that other
work on the machine disturbs little; tokenizing is outside. The first artifact is a torch one: `generate`
of transformers runs on its model, on the same batches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sacrebleu
import torch

from smelt.core.artifact import read_artifact
from smelt.data.batch import Batch
from smelt.data.examples import read_split
from smelt.data.splits import Columns
from smelt.generation.config import GenerationSettings
from smelt.generation.search import generate
from smelt.models.checkpoint import load_tokenizer
from smelt.models.length_limits import max_input_length
from smelt.runtimes.predict_texts import make_batches
from smelt.runtimes.registry import open_runner
from smelt.runtimes.runner import Runner

Rows = list[list[int]]


def transformers_generate(model: Any, beams: int) -> Callable[[Batch], Rows]:
    """Return what translates a batch with transformers alone."""

    def run(batch: Batch) -> Rows:
        with torch.inference_mode():
            out = model.generate(
                torch.from_numpy(batch.input_ids),
                attention_mask=torch.from_numpy(batch.attention_mask),
                num_beams=beams,
                do_sample=False,
                max_new_tokens=128,
            )
        rows: Rows = out[:, 1:].tolist()
        return rows

    return run


def smelt_generate(runner: Runner, wishes: GenerationSettings) -> Callable[[Batch], Rows]:
    """Return what translates a batch with smelt's loop."""
    return lambda batch: generate(runner, batch, wishes)


def main() -> None:
    """Run every system in turn, `--rounds` times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("test")
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--num-beams", dest="beams", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    split = read_split(options.test, "translation", Columns(), Path.cwd()).take(options.limit)
    runners = {path.name: open_runner(read_artifact(path), 1) for path in options.artifacts}
    first: Any = next(iter(runners.values()))
    tokenizer = load_tokenizer(first.folder)
    texts = [e.text for e in split.examples]
    limit = max_input_length(tokenizer, first.config)
    batches = make_batches(texts, tokenizer, options.batch_size, limit)
    for beams in options.beams:
        wishes = GenerationSettings(num_beams=beams, max_new_tokens=128)
        systems = {"transformers": transformers_generate(first.backend.model, beams)}
        for name, runner in runners.items():
            systems[f"{name} ({runner.name})"] = smelt_generate(runner, wishes)
        compare(systems, batches, tokenizer, split, f"beams {beams}", options.rounds)


def compare(
    systems: dict[str, Callable[[Batch], Rows]],
    batches: list[tuple[list[int], Batch]],
    tokenizer: Any,
    split: Any,
    title: str,
    rounds: int,
) -> None:
    """Print a line for each system; the first one is what the others' texts are compared with."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    outputs: dict[str, list[str]] = {}
    for _ in range(rounds):
        for name, system in systems.items():
            begin = time.process_time()
            found = [(rows, system(batch)) for rows, batch in batches]
            seconds[name].append(time.process_time() - begin)
            texts = [""] * len(split)
            for rows, tokens in found:
                for row, text in zip(
                    rows, tokenizer.batch_decode(tokens, skip_special_tokens=True), strict=True
                ):
                    texts[row] = text
            outputs[name] = texts
    print(f"{title}, {len(split)} sentences")
    references = [[e.references[0] for e in split.examples]]
    expected = next(iter(outputs.values()))
    for name, texts in outputs.items():
        bleu = sacrebleu.corpus_bleu(texts, references).score
        other = sum(a != b for a, b in zip(texts, expected, strict=True))
        took = statistics.median(seconds[name])
        print(f"  {name:32} {took:7.2f} s  BLEU {bleu:.4f}  {other} texts differ")


if __name__ == "__main__":
    main()
