"""How many answers change with the other texts of their batch.

    python benchmarks/neighbors.py TEST.jsonl.gz ARTIFACT ... --texts 200 --batch-size 16

Every artifact answers each text alone, then in batches whose texts are drawn again in each of `--orders`
shuffles, as a service fills them with whatever arrives. Counted are texts with more than one answer in these
shuffles, and texts whose answer alone is not that of every shuffle. An answer is a generated text, or a
label; of a classifier the largest change of a probability is printed too.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import smelt
from smelt.api.load import Model
from smelt.data.tasks import task_traits

LONGEST = 128  # new tokens
Answer = tuple[str, dict[str, float]]
"""A text or a label, and the probability of each label."""


def answers(model: Model, texts: list[str], size: int, beams: int) -> list[Answer]:
    """Return the answer to each text, in batches of `size` in the order of the texts."""
    outputs: list[Answer] = []
    for start in range(0, len(texts), size):
        batch = texts[start : start + size]
        if task_traits(model.task).generates:
            translations = model.generate(batch, size, num_beams=beams, max_new_tokens=LONGEST)
            outputs += [(text, {}) for text in translations]
        else:
            outputs += [(str(one.label), dict(one.probabilities)) for one in model.predict(batch, size)]
    return outputs


def compare(artifact: Path, texts: list[str], options: argparse.Namespace) -> str:
    """Return a row of the table."""
    by_text: list[list[Answer]] = [[] for _ in texts]
    with smelt.load(artifact, threads=1) as model:
        alone = answers(model, texts, 1, options.num_beams)
        for seed in range(options.orders):
            order = random.Random(seed).sample(range(len(texts)), len(texts))
            shuffled = answers(model, [texts[i] for i in order], options.batch_size, options.num_beams)
            for index, answer in zip(order, shuffled, strict=True):
                by_text[index].append(answer)
    changed = sum(len({text for text, _ in all_answers}) > 1 for all_answers in by_text)
    other = sum(
        {text for text, _ in all_answers} != {one[0]} for all_answers, one in zip(by_text, alone, strict=True)
    )
    largest = max(
        (
            max(answer[label] for _, answer in everything) - min(answer[label] for _, answer in everything)
            for everything in ([*all_answers, one] for all_answers, one in zip(by_text, alone, strict=True))
            for label in everything[0][1]
        ),
        default=None,
    )
    probability = "" if largest is None else f"{largest:.1e}"
    return f"| {artifact.name} | {changed} of {len(texts)} | {other} of {len(texts)} | {probability} |"


def read_texts(path: Path, count: int) -> list[str]:
    """Return the sources, or the texts, of the first rows of a file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        rows: list[dict[str, Any]] = [json.loads(line) for line in itertools.islice(stream, count)]
    return [row.get("source") or row["text"] for row in rows]


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("test", type=Path)
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-beams", type=int, default=1)
    parser.add_argument("--orders", type=int, default=5)
    options = parser.parse_args()
    texts = read_texts(options.test, options.texts)
    print("| artifact | other answer in another batch | other answer than alone | probability, at most |")
    print("|:--|--:|--:|--:|")
    for artifact in options.artifacts:
        print(compare(artifact, texts, options), flush=True)


if __name__ == "__main__":
    main()
