"""OpenVINO on the plain ONNX export, in float32, in bfloat16, and with NNCF's int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino

from peer_systems.worker import Case, Job, Opened, Rows, main

MODEL = "model.xml"


def feeds(rows: Rows) -> dict[str, Any]:
    """Return what the model takes: int64 [B, L] each."""
    ids = np.array(rows, dtype=np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def make(job: Job) -> None:
    """Read the ONNX file; int8: NNCF's post-training quantization for transformers, with its defaults.

    Both precisions around int8 run the same file.
    """
    if job["variant"] == "int8-bf16":
        return
    model = openvino.Core().read_model(Path(job["from"]) / "model.onnx")
    if job["variant"] == "int8-fp32":
        import nncf

        model = nncf.quantize(
            model,
            nncf.Dataset(job["calibration"], lambda row: feeds([row])),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(job["calibration"]),
        )
    openvino.save_model(model, Path(job["files"]) / MODEL, compress_to_fp16=False)


def serve(job: Job) -> Opened:
    """Compile for the CPU, in the variant's precision for what is not quantized."""
    settings = {
        "INFERENCE_NUM_THREADS": job["threads"],
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16" if job["variant"].endswith("bf16") else "f32",
    }
    folder = Path(job["from"] if job["variant"] == "int8-bf16" else job["files"])
    compiled = openvino.Core().compile_model(folder / MODEL, "CPU", settings)
    request = compiled.create_infer_request()

    def run(rows: Rows, case: Case) -> Rows:
        return list(request.infer(feeds(rows))[0].tolist())

    used = compiled.get_property("INFERENCE_PRECISION_HINT")
    return run, f"OpenVINO {openvino.__version__.split('-')[0]}, {used.get_type_name()}"


if __name__ == "__main__":
    main(make, serve)
