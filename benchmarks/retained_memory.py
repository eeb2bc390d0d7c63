"""Processor time of a training's update, with and without retaining freed memory.

    python benchmarks/retained_memory.py MODEL DATA.jsonl.gz [--rounds 5] [--updates 8]

Both arms distil a translator on the same batches, in alternating processes of one thread. They differ only in
`smelt.training.training_state.freed_memory_retained`. Prints user and system seconds an update.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path


def measure(model: Path, data: Path, updates: int, retained: bool) -> dict[str, float]:
    """Return user and system seconds of one update in this process."""
    from smelt.compress.distill.settings import DistillSettings
    from smelt.compress.distill.stage import Distill
    from smelt.core.artifact import Artifact, Manifest
    from smelt.data.splits import Columns
    from smelt.stage import Context
    from smelt.tasks.read_split import read_split
    from smelt.training import trainer

    if not retained:
        trainer.freed_memory_retained = nullcontext  # type: ignore[attr-defined, assignment]
    split = read_split(str(data), "translation", Columns(), Path())
    marks: list[tuple[float, float]] = []

    def mark(done: int, total: int, note: str = "") -> None:
        usage = os.times()
        marks.append((usage.user, usage.system))

    manifest = Manifest(
        key="0",
        format="torch",
        task="translation",
        stage="model",
        settings={},
        seed=0,
        parent=None,
        versions={},
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        out.mkdir()
        model_artifact = Artifact(model, manifest)
        ctx = Context(
            out, "translation", {"train": split}, 0, {"model": model_artifact}, lambda *_: {}, progress=mark,
            threads=1,
        )  # fmt: skip
        settings = DistillSettings.model_validate(
            {"student": {"decoder_layers": 1}, "losses": {"logits": 1.0, "labels": 0.0}, "num_evals": 0,
             "max_steps": updates + 2, "max_tokens_per_batch": 2500, "precision": "fp32"}
        )  # fmt: skip
        Distill()(model_artifact, settings, ctx)
    (user, system), (user_end, system_end) = marks[1], marks[-1]  # the first updates warm up
    return {"user": (user_end - user) / updates, "system": (system_end - system) / updates}


def main() -> None:
    """Measure in alternating processes and print medians and ranges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--arm", choices=("retained", "returned"))
    given = parser.parse_args()
    if given.arm:
        print(json.dumps(measure(given.model, given.data, given.updates, given.arm == "retained")))
        return
    found: dict[str, list[dict[str, float]]] = {"returned": [], "retained": []}
    for _ in range(given.rounds):
        for arm, rounds in found.items():
            options = [given.model, given.data, "--updates", given.updates, "--arm", arm]
            process = subprocess.run(
                [sys.executable, __file__, *map(str, options)], check=True, capture_output=True, text=True
            )
            rounds.append(json.loads(process.stdout.splitlines()[-1]))
            print(time.strftime("%H:%M:%S"), arm, rounds[-1], flush=True)
    for arm, rounds in found.items():
        for kind in ("user", "system"):
            values = [one[kind] for one in rounds]
            print(f"{arm} {kind}: {statistics.median(values):.3f} s [{min(values):.3f}, {max(values):.3f}]")
    ratios = [sum(a.values()) / sum(b.values()) for a, b in zip(*found.values(), strict=True)]
    print(f"returned / retained: {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")


if __name__ == "__main__":
    main()
