"""Text to text, smelt beside CTranslate2: processor time a sentence, in rounds that alternate.

    python benchmarks/beside_ctranslate2.py ARTIFACT TEST.jsonl.gz CT2_MODEL --python CT2_VENV/bin/python

ARTIFACT is an onnx artifact of a Marian model, CT2_MODEL the same model as CTranslate2 keeps it, with its
SentencePiece models beside it:

    python -m venv CT2_VENV && CT2_VENV/bin/pip install ctranslate2 sentencepiece transformers torch
    CT2_VENV/bin/ct2-transformers-converter --model MODEL --output_dir CT2_MODEL \\
        --copy_files source.spm target.spm

Each system has a process of its own, one thread, greedy search; both take the same lists of texts and give
texts. A process works only when it is its turn and is blocked on a pipe otherwise. The ratio is of each
round's two times; printed are its median and all that it ranged over.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import sacrebleu

WORKER = Path(__file__).parent / "translation_worker.py"


class System:
    """A worker process; see translation_worker.py for what is said to it."""

    def __init__(self, python: str, name: str, *arguments: str) -> None:
        self.name = name
        command = [python, "-W", "ignore", str(WORKER), name, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._read()["version"]

    def round(self, texts: list[str], batch_size: int) -> dict[str, Any]:
        """Translate `texts` in lists of `batch_size`; return seconds and texts."""
        assert self._process.stdin is not None
        print(json.dumps({"texts": texts, "batch_size": batch_size}), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the process ended with {self._process.wait()}.")
        answer: dict[str, Any] = json.loads(line)
        return answer


def compare(ours: System, theirs: System, rows: list[dict[str, Any]], batch_size: int, rounds: int) -> float:
    """Print what a round of each takes; return the median ratio of their processor times."""
    texts = [row["source"] for row in rows]
    found: dict[str, list[dict[str, Any]]] = {ours.name: [], theirs.name: []}
    for number in range(rounds + 1):
        # who begins alternates too; the first round warms up
        for system in (ours, theirs) if number % 2 else (theirs, ours):
            answer = system.round(texts, batch_size)
            if number:
                found[system.name].append(answer)
    ratios = {
        kind: [a[kind] / b[kind] for a, b in zip(found[ours.name], found[theirs.name], strict=True)]
        for kind in ("cpu_s", "wall_s")
    }
    print(f"batch {batch_size}: {len(texts)} sentences, {rounds} rounds")
    for name, answers in found.items():
        cpu = [1000 * a["cpu_s"] / len(texts) for a in answers]
        made = answers[-1]["texts"]
        bleu = sacrebleu.corpus_bleu(made, [[row["target"] for row in rows]]).score
        spread = f"{min(cpu):.2f} to {max(cpu):.2f}"
        print(f"  {name:12} {statistics.median(cpu):6.2f} ms a sentence ({spread})  BLEU {bleu:.2f}")
    for kind, values in ratios.items():
        what = {"cpu_s": "processor time", "wall_s": "clock"}[kind]
        middle, low, high = statistics.median(values), min(values), max(values)
        print(f"  smelt / CTranslate2, {what:14}: {middle:.2f} ({low:.2f} to {high:.2f})")
    return float(statistics.median(ratios["cpu_s"]))


def main() -> None:
    """Compare; exit 1 where smelt takes more than `--limit` times as long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("ct2_model", type=Path)
    parser.add_argument("--python", default=sys.executable, help="of an environment with ctranslate2")
    parser.add_argument("--compute-type", default="int8")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=float, default=1.4)
    options = parser.parse_args()
    probe = subprocess.run(
        [options.python, "-c", "import ctranslate2, sentencepiece"], check=False, capture_output=True
    )
    if probe.returncode:
        print(f"skipped: {options.python} has no ctranslate2 and sentencepiece; name one with --python.")
        return
    with gzip.open(options.test, "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream][: options.sentences]
    ours = System(sys.executable, "smelt", str(options.artifact))
    theirs = System(options.python, "ctranslate2", str(options.ct2_model), options.compute_type)
    print(f"{ours.version}; {theirs.version}, {options.compute_type}")
    ratios = [compare(ours, theirs, rows, size, options.rounds) for size in options.batch_sizes]
    sys.exit(0 if max(ratios) <= options.limit else 1)


if __name__ == "__main__":
    main()
