"""What layers of a translator cost: cuts of a model, untrained, in float32, beside the whole model.

    .venv/bin/python benchmarks/shapes.py

Every shape writes exactly as many tokens for each text, so that what a cut does to the texts changes no time;
training changes none either. Each round goes through all shapes in one process, in ONNX Runtime
(benchmarks/side_by_side.py): processor time, one thread, and the ratio to the whole model of the same round.
Needs the model and the data in ../shared (or --model and --data).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from side_by_side import compare
from techniques_bench import ArmRunner

from smelt.generation.config import GenerationSettings
from smelt.runtimes.registry import open_runner

SHARED = Path(__file__).parent.parent.parent / "shared"
_EXPORT_STAGE: tuple[str, dict[str, Any]] = ("onnx", {"target": "ort-cpu"})


def _drop_layers(encoder: int, decoder: int) -> tuple[str, dict[str, Any]]:
    return "drop-layers", {"encoder_layers": encoder, "decoder_layers": decoder, "importance": "uniform"}


SHAPES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "whole": [],
    "3 + 3": [_drop_layers(3, 3)],
    "4 + 2": [_drop_layers(4, 2)],
    "2 + 3": [_drop_layers(2, 3)],
    "4 + 1": [_drop_layers(4, 1)],
    "4 + 1, shortlist": [_drop_layers(4, 1), ("shortlist", {})],
    "2 + 1": [_drop_layers(2, 1)],
    "2 + 1, shortlist": [_drop_layers(2, 1), ("shortlist", {})],
}


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHARED / "models" / "marian-small-en-de")
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "multi30k_en_de")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as space, ExitStack() as stack:
        texts = (chosen.texts, chosen.texts)
        bench = ArmRunner(chosen.model, chosen.data, "translation", "test", texts, 1, Path(space))
        runners: dict[tuple[str, int], Any] = {}
        for name, stages in SHAPES.items():
            made = bench.run([*stages, _EXPORT_STAGE], 0, Path(space) / name)
            runners[name, 1] = stack.enter_context(open_runner(made.last, threads=1))
        search = GenerationSettings(
            num_beams=1, max_new_tokens=chosen.new_tokens, min_new_tokens=chosen.new_tokens
        )
        rows = sorted((e.text for e in bench.written.examples), key=len)
        print("| shape | threads | search | batch | ms | ratio | texts that differ |")
        print("|:--|--:|:--|--:|--:|--:|--:|")
        for size in chosen.batch_size:
            for line in compare(runners, rows, search, size, chosen.rounds, time.process_time):
                print(line, flush=True)


if __name__ == "__main__":
    main()
