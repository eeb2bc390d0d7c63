"""What each stage that does not train costs on a small translator: processor time and memory.

    python benchmarks/stage_cost.py                       # all; ../shared/models/marian-small-en-de
    python benchmarks/stage_cost.py --only "factorize*"

Each works in a process of its own, on one thread; what importing torch and the model's class takes is not
counted. Calibration rows are as many as the stage takes by default, of Multi30k's training data.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent
SHARED = BENCHMARKS.parent.parent / "shared"
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "prune, neurons": ("prune", {"targets": ["ffn"], "keep_ratio": 0.75}),
    "prune, heads": ("prune", {"targets": ["heads"], "keep_ratio": 0.75}),
    "prune, width": ("prune", {"targets": ["width"], "keep_ratio": 0.75}),
    "drop-layers, by loss": ("drop-layers", {"keep_ratio": 0.5}),
    "drop-layers, parts": ("drop-layers", {"targets": ["attention", "ffn"], "keep_ratio": 0.75}),
    "sparsify, wanda": ("sparsify", {"method": "wanda"}),
    "sparsify, sparsegpt": ("sparsify", {"method": "sparsegpt"}),
    "factorize, svd": ("factorize", {"method": "svd", "keep_ratio": 0.7}),
    "factorize, whitened": ("factorize", {"keep_ratio": 0.7}),
    "factorize, asvd": ("factorize", {"method": "asvd", "keep_ratio": 0.7}),
    "factorize, fwsvd": ("factorize", {"method": "fwsvd", "keep_ratio": 0.7}),
    "factorize, one budget": ("factorize", {"parameter_budget": 0.7}),
    "share-weights": ("share-weights", {}),
    "share-weights, low-rank delta": ("share-weights", {"low_rank_delta": {"rank": 16}}),
    "trim-vocabulary": ("trim-vocabulary", {}),
    "shortlist": ("shortlist", {}),
    "quantize, int4 rtn": ("quantize", {"scheme": "int4"}),
    "quantize, int4 gptq": ("quantize", {"scheme": "int4", "method": "gptq"}),
    "quantize, int4 awq": ("quantize", {"scheme": "int4", "method": "awq"}),
    "quantize, int4 hqq": ("quantize", {"scheme": "int4", "method": "hqq"}),
    "quantize, mixed 4.5": ("quantize", {"mixed_precision": {"target_bits": 4.5}}),
}


def run_stage(name: str, model: Path, data: Path) -> dict[str, float]:
    """Run one stage in this process; return its seconds of processor time and the peak of memory, bytes."""
    sys.path.insert(0, str(BENCHMARKS))
    import block_cost
    import techniques_bench
    import torch  # noqa: F401 - what is imported is not counted
    import transformers.models.marian.modeling_marian  # noqa: F401

    from smelt.core.stage import Context
    from smelt.data.examples import read_split
    from smelt.data.splits import Columns
    from smelt.pipeline.recipe.stages import load_stage

    word, settings = STAGES[name]
    cls: Any = load_stage(word)
    split = read_split(str(data), "translation", Columns(), data.parent)
    with tempfile.TemporaryDirectory() as space:
        out = Path(space) / "out"
        out.mkdir()
        ctx = Context(out, "translation", {"train": split}, 0, {}, lambda *_: {}, threads=1, device="cpu")
        begin = time.process_time()
        cls()(
            techniques_bench.artifact(model, "translation"), cls.settings_type.model_validate(settings), ctx
        )
        return {"seconds": time.process_time() - begin, "peak": block_cost.peak_bytes()}


def main(arguments: list[str]) -> int:
    """Print a row for each stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=SHARED / "models" / "marian-small-en-de")
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "multi30k_en_de" / "train.jsonl.gz")
    parser.add_argument("--only", default="*", help="a pattern of stages")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        print(json.dumps(run_stage(options.worker, options.model, options.data)))
        return 0
    print("| stage | processor time, s | peak, MB |\n|:--|--:|--:|")
    for name in (name for name in STAGES if fnmatch.fnmatch(name, options.only)):
        call = [sys.executable, __file__, "--worker", name, "--model", options.model, "--data", options.data]
        done = subprocess.run(call, check=False, capture_output=True, text=True)
        if done.returncode:
            print(f"| {name} | {done.stderr.splitlines()[-1]} | |", flush=True)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"| {name} | {found['seconds']:.1f} | {found['peak'] / 1e6:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
