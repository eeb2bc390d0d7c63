"""The codes of `quantize` that TensorRT runs, as engines: quality, and the time of 1, 8 and 32 texts.

    python benchmarks/engines.py --task translation                      # on a machine with an NVIDIA GPU
    python benchmarks/engines.py --task classification --model runs/sst2-small/artifacts/tuned
    python benchmarks/engines.py --task translation --build              # without one: only builds

Writes a recipe for the task, a branch for each arm (codes, graphs, engine), and lets `smelt run` do it: the
baseline is the engine in float32, without TF32, so that report.md has quality in pairs and times in turns
against float32 in the same runtime. Tasks, models and data are those of quantization.py, which does the same
for ONNX Runtime, OpenVINO and torch. `--build` wants a TensorRT that builds ahead of time; engines are then
kept and not scored.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from quantization import BATCHES, TASKS, data_of

from smelt.pipeline.recipe.yaml_file import dump_yaml

INT8: dict[str, Any] = {"scheme": "int8-static", "activations_symmetric": True}
# what TensorRT takes of int4: docs/reference/stages/tensorrt.md
INT4: dict[str, Any] = {
    "scheme": "int4", "method": "gptq", "group_size": 64, "symmetric": "positive", "accuracy_level": 0,
}  # fmt: skip
# each arm's codes, the dtype of its graphs, and what its engine is built with
ARMS: dict[str, tuple[dict[str, Any] | None, str, dict[str, Any]]] = {
    "fp32": (None, "fp32", {"tf32": False}),
    "tf32": (None, "fp32", {}),
    "fp16": (None, "fp16", {}),
    "fp8": ({"scheme": "fp8"}, "fp16", {}),
    "int8-static": (INT8, "fp32", {}),
    "int8-static-fp16": (INT8, "fp16", {}),
    "int4": (INT4, "fp32", {}),
    "int4-fp16": (INT4, "fp16", {}),
}
BASELINE = "fp32"
# one for each size that is timed: an engine is fastest at the sizes that a profile calls opt
PROFILES = [{"max_batch_size": size, "opt_batch_size": size} for size in BATCHES]


def recipe_of(name: str, model: Path, build: bool = False) -> dict[str, Any]:
    """Return the recipe of one task; build: engines are made where nothing can run them."""
    task = TASKS[name]
    stages: list[dict[str, Any]] = []
    for arm, (codes, dtype, flags) in ARMS.items():
        if codes is not None:
            stages.append({"quantize": codes, "name": f"{arm}-codes", "from": "model", "optional": True})
        source = "model" if codes is None else f"{arm}-codes"
        graphs = {"onnx": {"target": "tensorrt", "dtype": dtype}, "name": f"{arm}-graphs", "from": source}
        engine = {"tensorrt": {"profiles": PROFILES} | flags, "name": arm}
        stages += [step | {"optional": arm != BASELINE} for step in (graphs, engine)]
    data: dict[str, Any] = {split: str(data_of(name, split)) for split in ("train", "validation", "test")}
    if "windows" in task:
        data["windows"] = task["windows"]
    latency = {"batch_sizes": BATCHES, "texts": max(BATCHES), "threads": 1}
    return {
        "model": str(model.resolve()), "task": task["task"], "device": "cpu" if build else "cuda",
        "data": data, "stages": stages, "baseline": "model" if build else BASELINE,
        "score": task["score"] | {"latency": False if build else latency},
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    """Write one task's recipe and run it; the run's report.md has what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--model", type=Path, help="a trained model's folder")
    parser.add_argument("--build", action="store_true", help="build engines where no GPU is")
    parser.add_argument("--out", type=Path, default=Path("runs/engines"))
    options = parser.parse_args(arguments)
    model = options.model or TASKS[options.task].get("model")
    if model is None or not model.is_dir():
        parser.error(
            f"--model: {options.task} needs a trained model"
            f" (benchmarks/recipes/{TASKS[options.task]['from']})"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = options.out / f"{options.task}.yaml"
    recipe.write_text(dump_yaml(recipe_of(options.task, model, options.build)), encoding="utf-8")
    command = [sys.executable, "-m", "smelt", "run", str(recipe), "--out", str(options.out / options.task)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
