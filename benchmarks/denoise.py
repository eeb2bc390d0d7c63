"""Rows for denoising: texts with words deleted, to be written out whole again.

    .venv/bin/python benchmarks/denoise.py ../shared/data/dialogsum runs/denoise

They teach a summarizer that starts from nothing to look at its source: almost every word that it is to
write stands there. Writes train.jsonl.gz and
validation.jsonl.gz from the files of the same name, which hold `source` and `target`: every target, and
every source in pieces of at least PIECE words that end where a line does.

Source: token deletion, Lewis et al. 2020, BART, arXiv:1910.13461, section 2.2.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path

import click

SPLITS = ("train.jsonl.gz", "validation.jsonl.gz")


def text_pieces(text: str, least: int) -> Iterator[str]:
    """Yield `text` in pieces of whole lines, each of at least `least` words; a shorter rest is left out."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append(line)
        if sum(len(x.split()) for x in lines) >= least:
            yield "\n".join(lines)
            lines = []


def delete_words(text: str, share: float, draw: random.Random) -> str:
    """Return `text` without about `share` of its words; at least one stays."""
    words = text.split()
    return " ".join([token for token in words if draw.random() >= share] or words[:1])


@click.command()
@click.argument("data", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--piece", default=30, show_default=True, type=click.IntRange(min=1), help="Least words.")
@click.option("--share", default=0.2, show_default=True, type=click.FloatRange(0, 1), help="To delete.")
@click.option("--seed", default=0, show_default=True)
def main(data: Path, out: Path, piece: int, share: float, seed: int) -> None:
    """Write rows for denoising into OUT, from the rows in DATA."""
    out.mkdir(parents=True, exist_ok=True)
    for name in SPLITS:
        draw = random.Random(seed)
        with gzip.open(data / name, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        texts = [text for row in rows for text in (row["target"], *text_pieces(row["source"], piece))]
        with gzip.open(out / name, "wt", encoding="utf-8", newline="\n") as file:
            for text in texts:
                row = {"source": delete_words(text, share, draw), "target": text}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        click.echo(f"{out / name}: {len(texts)} rows")


if __name__ == "__main__":
    main()
