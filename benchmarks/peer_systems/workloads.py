"""The work that is measured: cases, what is fed, how good the outcome is."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peer_systems.models import BERT_VOCABULARY, LLAMA_VOCABULARY, OPUS_VOCABULARY, token_rows

WORKS = ("marian", "opus", "bert", "sst2", "llama")
CLASSIFIERS = ("bert", "sst2")
TITLES = {
    "marian": "marian-small (d 256, 4 + 3 layers, V 8,000), Multi30k, text to text",
    "opus": "opus-mt size (d 512, 6 + 6 layers, V 58,101, random weights), tokens to 32 new tokens",
    "bert": "BERT-base (random weights), tokens to logits",
    "sst2": "a fine-tuned BERT on SST-2, tokens to logits",
    "llama": "Llama-shaped, 100 M (random weights), a prompt of 128 tokens, 64 new ones",
}


@dataclass(frozen=True)
class Case:
    """A row of the issue's table: `rows` in lists of `batch`, each of `length` tokens (0: texts).

    workers: with more than one, each system gets all rows at once, in the order of the file, sorts and
    batches them itself, and computes as many batches at the same time.
    """

    work: str
    batch: int
    rows: int
    beams: int = 1
    threads: int = 1
    new_tokens: int = 128
    length: int = 0
    workers: int = 1

    @property
    def name(self) -> str:
        """The name of its results' folder, and what `--only` looks into."""
        workers = f"-workers{self.workers}" if self.workers > 1 else ""
        return f"{self.work}-batch{self.batch}-beams{self.beams}-threads{self.threads}{workers}"

    @property
    def title(self) -> str:
        """The heading of its table."""
        beams = f", {self.beams} beams" if self.beams > 1 else ", greedy"
        if self.work in CLASSIFIERS:
            beams = ""
        size = f"{self.batch} x {self.length}" if self.work == "bert" else str(self.batch)
        threads = "one thread" if self.threads == 1 else f"{self.threads} threads"
        workers = f", {self.workers} workers, all rows in one call" if self.workers > 1 else ""
        return f"{TITLES[self.work]}: batch {size}{beams}, {threads}{workers}"

    @property
    def unit(self) -> str:
        """What a time is of."""
        units = {"marian": "sentence", "opus": "row of 32 tokens", "bert": "row", "sst2": "sentence"}
        return units.get(self.work, "prompt")


def cases_of(work: str, rows: int) -> list[Case]:
    """Return the cases of `work`; `rows` sentences a round where texts are translated."""
    if work == "marian":
        alone = [Case(work, batch, rows, beams) for beams in (1, 4) for batch in (1, 8, 32)]
        return alone + [Case(work, 32, 15 * rows, beams, workers=2) for beams in (1, 4)]
    if work == "opus":
        return [Case(work, batch, 8, new_tokens=32, length=20) for batch in (1, 8)]
    if work == "llama":
        return [Case(work, 1, 2, new_tokens=64, length=128)]
    if work == "sst2":
        return [Case(work, 1, rows)]
    shapes = ((1, 128, 8), (8, 64, 16))
    return [
        Case(work, batch, count, threads=threads, length=length)
        for threads in (1, 2)
        for batch, length, count in shapes
    ]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a gzipped file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def batches(case: Case, texts: Sequence[Any]) -> list[list[Any]]:
    """Return what is fed in a round; `texts` for marian, sorted by length, as a service would group them.

    For sst2 `texts` are rows of token ids, in the order of the file.
    """
    if case.workers > 1:
        return [list(texts[: case.rows])]
    rows: list[Any] = (
        sorted(texts[: case.rows], key=len) if case.work == "marian" else list(texts[: case.rows])
    )
    if case.work not in ("marian", "sst2"):
        words = {"opus": OPUS_VOCABULARY, "bert": BERT_VOCABULARY, "llama": LLAMA_VOCABULARY}[case.work]
        rows = token_rows(case.rows, case.length, words)
    if case.work == "opus":
        rows = [[*row[:-1], 0] for row in rows]  # a text ends with </s>
    return [rows[start : start + case.batch] for start in range(0, len(rows), case.batch)]


def calibration(work: str) -> list[list[int]]:
    """Return the rows that static int8 of random weights is calibrated on: other ones than those measured."""
    return token_rows(32, 128, BERT_VOCABULARY, 7) if work == "bert" else []


def read_tokens(path: Path, model: Path) -> list[list[int]]:
    """Return the token ids of a file's texts, by the tokenizer.json of `model`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    return [tokenizer.encode(row["text"]).ids for row in read_rows(path)]


def quality(case: Case, outputs: list[Any], expected: list[Any] | None, targets: list[Any]) -> str:
    """Return the quality of what a system made, in words.

    Args:
        case: of what.
        outputs: a text, tokens or logits for each row.
        expected: what PyTorch's float32 model made; None where it did not run.
        targets: the translations of marian's texts, the labels of sst2's, in the order of `batches`.
    """
    if case.work == "marian":
        import sacrebleu

        return f"BLEU {sacrebleu.corpus_bleu(outputs, [targets]).score:.2f}"
    if case.work == "sst2":
        right = sum(int(np.argmax(row)) == label for row, label in zip(outputs, targets, strict=True))
        return f"{100 * right / len(outputs):.1f} % right"
    if expected is None:
        return "not compared"
    if case.work == "bert":
        ours, theirs = np.array(outputs), np.array(expected)
        same = int((ours.argmax(1) == theirs.argmax(1)).sum())
        error = float(np.sqrt(((ours - theirs) ** 2).mean()) / theirs.std())
        return f"{same} of {len(outputs)} labels, logits off by {100 * error:.1f} %"
    begun = [_common_prefix_length(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True)]
    return f"{sum(begun) / len(begun):.1f} of {case.new_tokens} tokens before the first other one"


def _common_prefix_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    differ = [index for index, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    return differ[0] if differ else min(len(ours), len(theirs))


def case_request(case: Case) -> dict[str, Any]:
    """Return what a worker is told of the case."""
    return {"beams": case.beams, "new_tokens": case.new_tokens, "batch": case.batch}
