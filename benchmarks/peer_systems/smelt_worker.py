"""smelt: `smelt.run` makes the artifact, the runner that `smelt.load` opens runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from peer_systems.worker import Case, Job, Opened, Rows, main

RECIPE = """
model: {model}
task: {task}
data: {{train: {train}, test: {data}, validation: {data}, calibration: {data}}}
stages: {stages}
score: {{latency: false{more}}}
"""
TASKS = {
    "marian": "translation",
    "opus": "translation",
    "bert": "text-classification",
    "llama": "language-modeling",
}
SHORTLIST = "-shortlist"
ONNX = {
    "": {"target": "ort-cpu"},
    "openvino": {"target": "openvino"},
    "openvino-int8-attention": {"target": "openvino", "attention": "int8"},
    "openvino-bf16": {"target": "openvino", "dtype": "bf16"},
}


def make(job: Job) -> None:
    """Run a recipe: the stages of the variant (SCHEME, SCHEME-shortlist or SCHEME@TARGET), then onnx."""
    import smelt

    scheme, _, target = job["variant"].removesuffix(SHORTLIST).partition("@")
    has_shortlist = job["variant"].endswith(SHORTLIST)
    steps: list[Any] = [{"shortlist": {}}] if has_shortlist else []
    steps += [] if scheme == "fp32" else [{"quantize": {"scheme": scheme}}]
    steps.append({"onnx": ONNX[target], "name": "made"})
    files = Path(job["files"])
    files.mkdir(parents=True, exist_ok=True)
    recipe = files / "recipe.yaml"
    recipe.write_text(
        RECIPE.format(
            model=job["model"],
            task=TASKS[job["work"]],
            data=job["data"],
            train=Path(job["data"]).with_name("train.jsonl.gz") if has_shortlist else job["data"],
            stages=json.dumps(steps),
            more=", generation: {max_new_tokens: 8}" if job["work"] in ("marian", "opus") else "",
        ),
        encoding="utf-8",
    )
    limit = (
        None if has_shortlist else job.get("limit", 32)
    )  # it would also limit what the shortlist learns from
    # one store for all of a work's artifacts: a quantized model is exported to several targets
    store = files.parent / ".store"
    result = smelt.run(recipe, out=files / "run", store=store, limit=limit, quiet=True)
    if result.exit_code:
        raise SystemExit(f"{recipe} ended with {result.exit_code}; see {files / 'run' / 'report.md'}.")


def artifact_of(job: Job) -> Path:
    """Return the artifact that was given, or the one that `make` made."""
    return Path(job["artifact"]) if "artifact" in job else Path(job["files"]) / "run" / "artifacts" / "made"


def serve(job: Job) -> Opened:
    """Open the artifact: text to text for marian, tokens in for the rest."""
    import smelt
    from smelt.core.artifact import read_artifact
    from smelt.generation.backend import Batch
    from smelt.generation.config import GenerationSettings, resolve_generation
    from smelt.runtimes.registry import open_runner

    version = f"smelt, ONNX Runtime {onnxruntime.__version__}"
    if job["work"] == "marian":
        model = smelt.load(artifact_of(job), threads=job["threads"], workers=job.get("workers", 1))

        def translate(texts: Rows, case: Case) -> Rows:
            return model.generate(
                texts, case["batch"], num_beams=case["beams"], max_new_tokens=case["new_tokens"]
            )

        return translate, version
    runner = open_runner(read_artifact(artifact_of(job)), job["threads"])
    version = f"smelt, {runner.name} {runner.version}"

    def run(rows: Rows, case: Case) -> Rows:
        ids = np.array(rows, dtype=np.int64)
        batch = Batch(ids, np.ones_like(ids))
        if job["work"] == "bert":
            return list(runner.forward(batch).tolist())
        count = case["new_tokens"]
        wanted = GenerationSettings(num_beams=case["beams"], max_new_tokens=count, min_new_tokens=count)
        return [
            [int(token) for token in row]
            for row in runner.generator(runner, batch, resolve_generation(wanted, runner))
        ]

    return run, version


if __name__ == "__main__":
    main(make, serve)
