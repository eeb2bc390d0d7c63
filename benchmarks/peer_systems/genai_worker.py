"""onnxruntime-genai: the graph of its model builder, its own loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime_genai

from peer_systems.worker import Case, Job, Opened, Rows, main


def make(job: Job) -> None:
    """Build the model for the CPU in the precision of the variant."""
    files = Path(job["files"])
    options = ["hf_token=false", *([] if job["variant"] == "fp32" else ["int4_accuracy_level=4"])]
    where = ["-i", job["model"], "-o", str(files), "-c", str(files / "cache")]
    what = ["-p", job["variant"], "-e", "cpu", "--extra_options", *options]
    builder = [sys.executable, "-P", "-m", "onnxruntime_genai.models.builder", *where, *what]
    subprocess.run(builder, check=True)


def serve(job: Job) -> Opened:
    """Open the folder; the number of threads stands in its settings."""
    path = Path(job["files"]) / "genai_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = job["threads"]
    path.write_text(json.dumps(settings), encoding="utf-8")
    model = onnxruntime_genai.Model(job["files"])

    def run(rows: Rows, case: Case) -> Rows:
        prompt = len(rows[0])
        length = prompt + case["new_tokens"]
        wanted = onnxruntime_genai.GeneratorParams(model)
        wanted.set_search_options(
            batch_size=len(rows), max_length=length, min_length=length, do_sample=False, num_beams=1
        )
        generator = onnxruntime_genai.Generator(model, wanted)
        generator.append_tokens(np.array(rows, dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [generator.get_sequence(index)[prompt:].tolist() for index in range(len(rows))]

    return run, f"onnxruntime-genai {onnxruntime_genai.__version__}"


if __name__ == "__main__":
    main(make, serve)
